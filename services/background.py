"""Start, find and stop the servers of `dpo up`, which outlive the command that started them.

`.services/<name>.json` records a service's process id and start time (ids are reused, so both must match), and
`.services/<name>.log` holds its output. Descendants of a service inherit DPO_SERVICE in their environment, so that
those of a killed service can still be found and stopped.

Prefect's own `server start --background` starts its server without our gate and log, in the terminal's process group,
where Ctrl-C ends it. supervisord leaves children of a killed server, which keep its port: it never starts again.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from services import health
from services.health import rotate
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.system import processes
from tasks.system.files import read_json_or_empty, write_text
from tasks.system.lock import exclusive

FOLDER = ROOT / ".services"
SERVICE_VARIABLE = "DPO_SERVICE"
START_TIMEOUT = 600.0  # seconds; a service that ended is noticed at once, so this is for a busy machine


@dataclass(frozen=True)
class Service:
    name: str
    pid: int
    began: float  # seconds since boot: unlike the time of day, nobody can set it
    port: int
    address: str  # of its pages
    health: str  # URL that returns 200 when the service works

    @property
    def process(self) -> psutil.Process | None:
        """The process if it is alive; None if it ended, also when another process now has its id."""
        try:
            process = psutil.Process(self.pid)
            same = abs(_began(process) - self.began) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if same else None

    def environment(self) -> dict[str, str]:
        process = self.process
        return process.environ() if process else {}

    @property
    def since(self) -> datetime:
        return datetime.fromtimestamp(psutil.boot_time() + self.began).astimezone()

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"

    def is_healthy(self) -> bool:
        return health.is_healthy(self.health)


def make_folder() -> None:
    FOLDER.mkdir(mode=0o700, exist_ok=True)  # logs and MLflow's user database are private


def start(name: str, command: Sequence[str], env: Mapping[str, str], port: int, address: str, health: str) -> Service:
    """Start a service in its own session, so that neither Ctrl-C nor closing the terminal stops it."""
    end_leftovers(name)
    make_folder()
    with rotate(FOLDER / f"{name}.log").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, SERVICE_VARIABLE: _mark(name)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    service = Service(name, process.pid, _began(psutil.Process(process.pid)), port, address, health)
    write_text(FOLDER / f"{name}.json", json.dumps(asdict(service)) + "\n")
    return service


def _began(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()


def last_started(name: str) -> Service | None:
    """The service as it was last started; its process may have ended since."""
    try:
        return Service(**read_json_or_empty(FOLDER / f"{name}.json"))
    except TypeError:  # missing or damaged
        return None


def running(name: str) -> Service | None:
    service = last_started(name)
    return service if service and service.process else None


def wait_until_healthy(service: Service, title: str) -> None:
    try:
        health.wait_until_healthy(
            service.health,
            f"{title} did not start",
            service.log,
            lambda: service.process is not None,
            START_TIMEOUT,
            waiting_for=title,
        )
    except UserError as error:
        then = "Fix the cause and run `dpo up` again; `dpo down` stops the services that did start."
        raise UserError(f"{error}\n{then}") from None


def stop(name: str) -> bool:
    """Stop a service and its descendants. Returns whether there was anything to stop."""
    service = running(name)
    if service:
        processes.terminate(service.pid)
    leftovers = end_leftovers(name)
    (FOLDER / f"{name}.json").unlink(missing_ok=True)
    return bool(service) or leftovers


def end_leftovers(name: str) -> bool:
    """End descendants of a killed service: they may still hold its port. Returns whether there were any."""
    others = [process for process in psutil.process_iter(["environ"]) if process.pid != os.getpid()]
    leftovers = [process for process in others if (process.info["environ"] or {}).get(SERVICE_VARIABLE) == _mark(name)]
    for process in leftovers:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(leftovers, timeout=processes.GRACE)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(leftovers)


def _mark(name: str) -> str:
    return f"{name} of {ROOT}"


def exclusive_lock() -> AbstractContextManager[None]:
    """Held by commands that start or stop services: two at once would undo each other's work."""
    make_folder()
    return exclusive(
        FOLDER / "lock", lambda holder: print(f"Waiting for {holder}, which starts or stops services", flush=True)
    )
