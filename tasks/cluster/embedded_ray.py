"""An embedded Ray cluster on this machine: its environment, its private session folder, and its start.

Ray reads its authentication settings when it is imported, so import it only after `set_environment`.
"""

import logging
import math
import os
import re
import secrets
import shutil
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

CODE = Path(__file__).resolve().parents[2]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the network interface
AGENT_FAILED = re.compile(r"one Ray agent failed, agent_name = (\w+)")  # in raylet.out
LOG_LINES = 12  # of a log in an error message


def worker_environment(config: Ray, interface: str | None = LOOPBACK) -> dict[str, str]:
    """The variables of the workers. `interface` is that of collectives: a host with several addresses may choose one
    that the others cannot reach."""
    # As this process began: a stage that has changed a variable for itself still finds the flow's cluster.
    network = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    return {**QUIET, **config.env, **network}


def python_path() -> str:
    """Where the workers find our code: this checkout or worktree first."""
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([str(CODE), *others]))


def set_environment(environment: Mapping[str, str], token: str | None = None) -> None:
    """Of this process, which a cluster's processes inherit: that is cheaper than a runtime environment of Ray's."""
    os.environ.update(environment, PYTHONPATH=python_path(), RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0")
    os.environ.update(RAY_prestart_worker_first_driver="0")  # Ray Train's actors cannot use such workers
    # No driver shows its workers' logs; Ray's monitor would look for new ones ten times a second: 1 to 3% of a core.
    os.environ.update(RAY_LOG_MONITOR_MANY_FILES_THRESHOLD="0", LOG_NAME_UPDATE_INTERVAL_S="86400")
    # A token for this cluster alone: Ray writes none into the home folder, and reaches no other cluster.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token or secrets.token_hex(32))
    # Ray's only switch for binding to loopback: a node that cannot join other machines has the address 127.0.0.1.
    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")


@contextmanager
def started(cpus: float) -> Iterator[Path]:
    """Start a cluster of this process's own; yields its session folder. The caller ends it with `ray.shutdown`."""
    with private_session() as folder:
        start_ray(math.ceil(cpus), folder / "ray")
        yield folder


@contextmanager
def private_session(temporary: Path | None = None) -> Iterator[Path]:
    """A folder that only this user can enter, deleted at the end; the next start deletes those of killed processes.

    Ray makes its own folders with mode 0777, so they lie below one of mode 0700. A driver holds the lock of its
    session, and the kernel releases the lock however the driver ends.
    """
    temporary = temporary or Path(tempfile.gettempdir())
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


def start_ray(cpus: int, folder: Path, tries: int = 3) -> None:
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
        start_ray(cpus, folder, tries - 1)


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
