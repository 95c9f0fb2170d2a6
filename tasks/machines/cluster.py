"""The Ray cluster: an embedded one on this machine, or the one whose address is configured.

Ray reads its authentication settings when it is imported, so nobody imports it before `ray_cluster` has begun.
"""

import logging
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tasks import place
from tasks.errors import UserError
from tasks.files import home
from tasks.machines import nodes
from tasks.machines.flock import locked
from tasks.progress import Bar
from tasks.stage import QUIET
from training.dtypes import slow_here

CODE = Path(__file__).resolve().parents[2]
PATIENCE = 5.0  # seconds for a head to answer
JOIN = "A driver runs on a node: `ray start --address HEAD:PORT --num-cpus 0` makes this machine one, without work."
RESTARTS = 2  # of an actor whose worker or node is lost
AGENT_FAILED = re.compile(r"one Ray agent failed, agent_name = (\w+)")  # in raylet.out
LOG_LINES = 12  # of a log that are shown
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the interface

Group = place.Group


@contextmanager
def ray_cluster(where: place.Ray, cpus: float) -> Iterator[Path | None]:
    """Connect, and leave nothing behind. `cpus` is what an embedded cluster is made with.

    Yields the private folder of an embedded cluster, None for any other.
    """
    quiet = {name: os.environ.get(name, value) for name, value in QUIET.items()}  # what the user has set stays
    embedded = where.address == "local"
    environment = {**quiet, **where.env, **_network(LOOPBACK if embedded else where.interface)}
    with _embedded(cpus, environment) if embedded else _connected(where.address, environment) as folder:
        yield folder


def _network(interface: str | None) -> dict[str, str]:
    """Which way the workers' collectives take: a host with several addresses may choose one that nobody reaches."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}


@contextmanager
def _embedded(cpus: float, environment: Mapping[str, str]) -> Iterator[Path]:
    # Inherited by the cluster's processes: cheaper than an environment of Ray's making.
    paths = dict.fromkeys([str(CODE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    os.environ.update(environment, PYTHONPATH=os.pathsep.join(paths), RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0")
    os.environ.update(RAY_prestart_worker_first_driver="0")  # Ray Train's actors cannot use such workers
    # A token of its own, so that nothing is written into the home folder and no other Ray is reached.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    # Ray's only switch for binding to loopback: without clusters of several machines, a node's address is 127.0.0.1.
    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    import ray

    with private_session(Path(tempfile.gettempdir())) as folder:
        try:
            _start(int(-(-cpus // 1)), folder / "ray")
            yield folder
        finally:
            ray.shutdown()


@contextmanager
def private_session(temporary: Path) -> Iterator[Path]:
    """A folder that only this user can enter, deleted at the end; one left by a killed process goes at the next start.

    Ray makes its own folders mode 0777, so they lie below one of mode 0700. The lock of a live session is held by its
    driver, and the kernel releases it when the driver ends in any way.
    """
    sessions = temporary / f"dpo-ray-{os.getuid()}"  # short: Ray's socket names have a length limit
    sessions.mkdir(mode=0o700, exist_ok=True)
    found = sessions.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(
            f"{sessions} is not a folder of mode 0700 that belongs to this user, so another user could read or change "
            "Ray's session. Delete it, or set TMPDIR to a folder of your own."
        )
    with ExitStack() as held:
        with locked(sessions / "lock"):  # nobody clears away a folder between its creation and its lock
            for left in sessions.iterdir():
                with locked(left / "lock", wait=False) if left.is_dir() else nullcontext(False) as ours:
                    if ours:
                        shutil.rmtree(left, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix="", dir=sessions))
            held.enter_context(locked(folder / "lock"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _start(cpus: int, folder: Path, tries: int = 3) -> None:
    """Ray gives its processes 30 seconds. On a busy machine that is too little, so a timeout alone is tried again."""
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,  # our workers report through files; Ray's own chatter stays in its logs
            _temp_dir=str(folder),
        )
    except Exception as error:
        ray.shutdown()
        logs = folder / "session_latest" / "logs"
        if agent := AGENT_FAILED.search(_read(logs / "raylet.out")):
            raise UserError(_agent_failed(logs, agent[1])) from error
        if "timed out during startup" not in str(error) or tries == 1:
            said = _tail(logs / "raylet.out")
            raise RuntimeError(f"Ray does not start: {error}{said and ' raylet.out ends with: ' + said}") from error
        _start(cpus, folder, tries - 1)


def _agent_failed(logs: Path, agent: str) -> str:
    """Ray's own message hides the reason: an agent that ended takes the raylet with it, which Ray calls a timeout."""
    if said := _tail(logs / f"{agent}.log"):
        return (
            f"Ray does not start: its process {agent} failed. Its log ends with:\n{said}\nCorrect that (a package that "
            "cannot be imported, PYTHONPATH, a full disk), and run again."
        )
    return (
        f"Ray does not start: its process {agent} failed before it wrote a log. Usually it cannot import Ray's "
        f"packages: check that {sys.executable} with PYTHONPATH={os.environ['PYTHONPATH']} can import "
        "ray.dashboard.agent."
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _tail(path: Path) -> str:
    """The last lines, without the frames of C++."""
    lines = [line for line in _read(path).splitlines() if line.strip() and "(+0x" not in line]
    return "\n".join(lines[-LOG_LINES:])


@contextmanager
def _connected(address: str, environment: dict[str, str]) -> Iterator[None]:
    """Our code travels to the nodes; data do not: they are on shared storage (tasks/machines/nodes.py)."""
    _find_token()
    if address != "auto":
        _reach(address)
    # Ray asks a head that refuses us twenty times, and writes a line about each.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "4")
    import ray

    environment.pop("DS_ACCELERATOR", None)  # whether there is a GPU is each node's to say
    packages = [str(CODE / name) for name in ("tasks", "training")]
    runtime = {"py_modules": packages, "excludes": ["__pycache__"], "env_vars": environment}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, runtime_env=runtime)
    except ConnectionError as error:
        if address == "auto":
            raise UserError(f"ray.address is auto, and this machine is no node of a Ray cluster. {JOIN}") from error
        raise UserError(
            f"The Ray head at {address} (ray.address in infra/cluster.yaml) does not accept our token. Give this "
            "process the cluster's own, in RAY_AUTH_TOKEN or as a file named by RAY_AUTH_TOKEN_PATH; "
            "`ray get-auth-token` prints it on the head."
        ) from error
    except RuntimeError as error:
        raise UserError(_mismatch(address, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _find_token() -> None:
    if os.environ.setdefault("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    if not path.is_file() or not path.read_text().strip():
        raise UserError(
            f"There is no token for the Ray cluster: RAY_AUTH_TOKEN is not set and {path} holds none. Copy the head's "
            "(`ray get-auth-token` prints it there) into RAY_AUTH_TOKEN, or into a file named by RAY_AUTH_TOKEN_PATH."
        )


def _reach(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except OSError as error:
        raise UserError(
            f"No Ray head answers at {address}, ray.address in infra/cluster.yaml ({error}). Start one there with "
            f"`ray start --head --port {port}`, mend the address, or set it to local."
        ) from error


def _mismatch(address: str, error: Exception) -> str:
    said = " ".join(str(error).split())
    if "ersion" in said:  # Ray names both sides
        return f"Ray or Python differ between the head at {address} and this machine: {said} Install the same on both."
    return f"This machine is no node of the Ray cluster at {address} ({said}). {JOIN}"


def on_nodes(cluster: place.Cluster, root: Path, parts: Sequence[Path] = ()) -> Path:
    """A folder as every node finds it: itself, or a copy on shared storage of its `parts` that workers read."""
    if cluster.ray.address == "local":
        return root.resolve()
    shared = home() / cluster.output_dir
    nodes.check_storage(shared)
    return nodes.share(shared, root, parts or [Path()], times=bool(parts))


@contextmanager
def room_for(where: place.Ray, group: Group, workers: int) -> Iterator[Any]:
    """A place for each worker of a group, spread over the nodes as configured, once there is room for all.

    Nodes may have come for it (an autoscaler's): only now it is known that all run what we run.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    embedded = where.address == "local"
    placed = placement_group([bundle(group)] * workers, strategy=group.placement)
    try:
        nodes.wait_for(placed, bundle(group), workers, embedded)
        if not embedded:
            nodes.check_versions()
        yield placed
    finally:
        remove_placement_group(placed)


@contextmanager
def nodes_told(where: place.Ray, bar: Bar) -> Iterator[None]:
    """Say which nodes are lost and which join, meanwhile."""
    with nullcontext() if where.address == "local" else nodes.watched(lambda said: bar.say(f"{bar.stage}: {said}")):
        yield


def worker(group: Group, actor: type, placed: Any, number: int, restarts: int = RESTARTS) -> Any:
    """The actor of a group's worker in its place; when the worker or its node is lost, it starts again."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return ray.remote(
        num_cpus=group.cpus_per_worker,
        num_gpus=group.gpus_per_worker,
        resources=group.resources,
        max_restarts=restarts,
        max_task_retries=restarts,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placed, number),
    )(actor)


def bundle(group: Group) -> dict[str, float]:
    """What one worker of a group takes of its node."""
    gpus = {"GPU": group.gpus_per_worker} if group.gpus_per_worker else {}
    return {"CPU": group.cpus_per_worker, **gpus, **group.resources}


def look_again(folder: Path) -> None:
    """A network file system may show a folder as it was half a minute ago, until we change something in it."""
    mark = folder / f".look-{uuid.uuid4().hex[:8]}"
    mark.touch()
    mark.unlink()


def warn_of_slow_dtype(stage: str, dtype: str, gpus: float) -> None:
    if not gpus and slow_here(dtype):
        print(f"warning: this CPU has no {dtype} and is very slow with it. Set {stage}.dtype to float32.", flush=True)
