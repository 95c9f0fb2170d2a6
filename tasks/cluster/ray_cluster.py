"""The Ray cluster: an embedded one on this machine, or the one at `ray.address`.

Ray reads its authentication settings when it is imported, so import it only inside a `ray_cluster` block.
"""

import logging
import math
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from tasks.config.cluster import Ray
from tasks.errors import UserError
from tasks.system.environment import QUIET
from tasks.system.lock import file_lock
from training.models.dtypes import is_slow_on_cpu

CODE = Path(__file__).resolve().parents[2]
HEAD_TIMEOUT = 5.0  # seconds for a head to accept a connection
HOW_TO_JOIN = (
    "A driver runs on a node: `ray start --address HEAD:PORT --num-cpus 0` makes this machine one that takes no work."
)
AGENT_FAILED = re.compile(r"one Ray agent failed, agent_name = (\w+)")  # in raylet.out
LOG_LINES = 12  # of a log in an error message
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the network interface


@contextmanager
def ray_cluster(config: Ray, cpus: float) -> Iterator[Path | None]:
    """Connect to the cluster for the time of the block. An embedded cluster gets so many `cpus`.

    Yields the private session folder of an embedded cluster, None for any other.
    """
    defaults = {name: os.environ.get(name, value) for name, value in QUIET.items()}
    embedded = config.address == "local"
    environment = {**defaults, **config.env, **_network(LOOPBACK if embedded else config.interface)}
    with _embedded(cpus, environment) if embedded else _connected(config.address, environment) as session:
        yield session


def _network(interface: str | None) -> dict[str, str]:
    """The interface of collectives: a host with several addresses may choose one that the others cannot reach."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}


@contextmanager
def _embedded(cpus: float, environment: Mapping[str, str]) -> Iterator[Path]:
    # The cluster's processes inherit it, which is cheaper than a runtime environment of Ray's.
    paths = dict.fromkeys([str(CODE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    os.environ.update(environment, PYTHONPATH=os.pathsep.join(paths), RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0")
    os.environ.update(RAY_prestart_worker_first_driver="0")  # Ray Train's actors cannot use such workers
    # A token for this cluster alone: Ray writes none into the home folder, and reaches no other cluster.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    # Ray's only switch for binding to loopback: a node that cannot join other machines has the address 127.0.0.1.
    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    import ray

    with private_session(Path(tempfile.gettempdir())) as folder:
        try:
            _start_ray(math.ceil(cpus), folder / "ray")
            yield folder
        finally:
            ray.shutdown()


@contextmanager
def private_session(temporary: Path) -> Iterator[Path]:
    """A folder that only this user can enter, deleted at the end; the next start deletes those of killed processes.

    Ray makes its own folders with mode 0777, so they lie below one of mode 0700. A driver holds the lock of its
    session, and the kernel releases the lock however the driver ends.
    """
    sessions = temporary / f"dpo-ray-{os.getuid()}"  # short: Ray's socket names have a length limit
    sessions.mkdir(mode=0o700, exist_ok=True)
    state = sessions.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise UserError(
            f"{sessions} is not a folder of mode 0700 that belongs to this user, so another user could read or change "
            "Ray's session. Delete it, or set TMPDIR to a folder of your own."
        )
    with ExitStack() as session_lock:
        with file_lock(sessions / "lock"):  # no process deletes a folder between its creation and its lock
            for session in sessions.iterdir():
                with file_lock(session / "lock", wait=False) if session.is_dir() else nullcontext(False) as abandoned:
                    if abandoned:
                        shutil.rmtree(session, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix="", dir=sessions))
            session_lock.enter_context(file_lock(folder / "lock"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _start_ray(cpus: int, folder: Path, tries: int = 3) -> None:
    """Ray gives its processes 30 seconds, which is too little on a busy machine: retry after a timeout."""
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,  # workers report through files; Ray's own messages stay in its logs
            _temp_dir=str(folder),
        )
    except Exception as error:
        ray.shutdown()
        logs = folder / "session_latest" / "logs"
        if agent := AGENT_FAILED.search(_read(logs / "raylet.out")):
            raise UserError(_agent_failed(logs, agent[1])) from error
        if "timed out during startup" not in str(error) or tries == 1:
            log = _tail(logs / "raylet.out")
            raise RuntimeError(f"Ray does not start: {error}{log and ' raylet.out ends with: ' + log}") from error
        _start_ray(cpus, folder, tries - 1)


def _agent_failed(logs: Path, agent: str) -> str:
    """Ray hides the reason: when an agent ends, the raylet ends with it, and Ray reports a timeout."""
    if log := _tail(logs / f"{agent}.log"):
        return (
            f"Ray does not start: its process {agent} failed. Its log ends with:\n{log}\nCorrect that (a package that "
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
    """The last lines, without C++ stack frames."""
    lines = [line for line in _read(path).splitlines() if line.strip() and "(+0x" not in line]
    return "\n".join(lines[-LOG_LINES:])


@contextmanager
def _connected(address: str, environment: dict[str, str]) -> Iterator[None]:
    """Ray sends our code to the nodes. Data is on shared storage (tasks/cluster/nodes.py)."""
    _require_token()
    if address != "auto":
        _check_head(address)
    # By default Ray tries a head that rejects the token twenty times, and logs a line for each.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "4")
    import ray

    environment.pop("DS_ACCELERATOR", None)  # each node detects its own GPUs
    packages = [str(CODE / name) for name in ("tasks", "training")]
    runtime_env = {"py_modules": packages, "excludes": ["__pycache__"], "env_vars": environment}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, runtime_env=runtime_env)
    except ConnectionError as error:
        if address == "auto":
            raise UserError(f"ray.address is auto, but this machine is not a Ray node. {HOW_TO_JOIN}") from error
        raise UserError(
            f"The Ray head at {address} (ray.address in infra/cluster.yaml) does not accept our token. Set "
            "RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a file with it; `ray get-auth-token` on "
            "the head prints it."
        ) from error
    except RuntimeError as error:
        raise UserError(_explain_refusal(address, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_token() -> None:
    if os.environ.setdefault("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    if not path.is_file() or not path.read_text().strip():
        raise UserError(
            f"No token for the Ray cluster: RAY_AUTH_TOKEN is not set and {path} is missing or empty. Copy the head's "
            "token (`ray get-auth-token` prints it there) into RAY_AUTH_TOKEN, or into a file named by "
            "RAY_AUTH_TOKEN_PATH."
        )


def _check_head(address: str) -> None:
    """Fail within seconds: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=HEAD_TIMEOUT).close()
    except OSError as error:
        raise UserError(
            f"No Ray head answers at {address}, ray.address in infra/cluster.yaml ({error}). Start one there with "
            f"`ray start --head --port {port}`, correct the address, or set it to local."
        ) from error


def _explain_refusal(address: str, error: Exception) -> str:
    message = " ".join(str(error).split())
    if "ersion" in message:  # Ray names the versions of both sides
        return (
            f"Ray or Python differ between the head at {address} and this machine: {message} Install the same on both."
        )
    return f"This machine is not a node of the Ray cluster at {address} ({message}). {HOW_TO_JOIN}"


def warn_of_slow_dtype(stage: str, dtype: str, gpus: float) -> None:
    if not gpus and is_slow_on_cpu(dtype):
        print(f"warning: this CPU has no {dtype} instructions: slow. Set {stage}.dtype to float32.", flush=True)
