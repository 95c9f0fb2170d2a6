"""The servers that outlive the command that started them: how one is started, found again and ended.

A service is known by its process id and the moment at which that process began, since ids are used again; both stand in
.services/<name>.json, with its log beside. What a service starts inherits a mark in its environment, so that what was
left behind by a killed one is found too.
"""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from flows import ROOT, child
from tasks.errors import UserError
from tasks.machines.lock import alone

FOLDER = ROOT / ".services"
MARK = "DPO_SERVICE"
PATIENCE = 180.0  # seconds; a first start makes a database
NEWS = 10.0  # seconds between lines that say that we still wait


@dataclass(frozen=True)
class Service:
    name: str
    pid: int
    began: float  # seconds after the machine's start, which no change of the clock moves
    port: int
    address: str  # of its pages, or of its health
    health: str  # answers when it works

    @property
    def process(self) -> psutil.Process | None:
        """The process itself, while it lives; not another one that got its number."""
        try:
            process = psutil.Process(self.pid)
            ours = abs(_began(process) - self.began) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if ours else None

    def environment(self) -> dict[str, str]:
        """What it was started with."""
        process = self.process
        return process.environ() if process else {}

    @property
    def since(self) -> datetime:
        return datetime.fromtimestamp(psutil.boot_time() + self.began).astimezone()

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"

    def answers(self) -> bool:
        return answers(self.health)

    def last_words(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def answers(health: str) -> bool:
    try:
        with urllib.request.urlopen(health, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def make_folder() -> None:
    FOLDER.mkdir(mode=0o700, exist_ok=True)  # logs and MLflow's users are nobody else's


def start(name: str, command: Sequence[str], env: Mapping[str, str], port: int, address: str, health: str) -> Service:
    """Start it in a session of its own: neither Ctrl-C nor the end of our terminal reaches it."""
    end_leftovers(name)
    make_folder()
    log = FOLDER / f"{name}.log"
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, MARK: _mark(name)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    service = Service(name, process.pid, _began(psutil.Process(process.pid)), port, address, health)
    note = FOLDER / f"{name}.json"
    note.with_suffix(".tmp").write_text(json.dumps(asdict(service)) + "\n")
    note.with_suffix(".tmp").replace(note)
    return service


def _began(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()


def known(name: str) -> Service | None:
    """As it was last started; it may be gone by now."""
    try:
        return Service(**json.loads((FOLDER / f"{name}.json").read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def running(name: str) -> Service | None:
    service = known(name)
    return service if service and service.process else None


def prefect_access(server: Service) -> dict[str, str]:
    """What leads a program of ours to the server of `make up`, its password included."""
    secret = server.environment().get("PREFECT_SERVER_API_AUTH_STRING", "")
    return {"PREFECT_API_URL": f"{server.address}/api", "PREFECT_API_AUTH_STRING": secret}


def wait_for(service: Service, title: str) -> None:
    """Until it answers; says so now and then, and what it wrote when it gave up."""
    began = said = time.monotonic()
    while not service.answers():
        now = time.monotonic()
        if service.process is None or now - began > PATIENCE:
            what = "ended at once" if service.process is None else f"did not answer within {PATIENCE:.0f} s"
            raise UserError(
                f"{title} {what}. It wrote to {service.log}:\n{service.last_words()}\n"
                "Mend that and run `make up` again; `make down` ends what did start."
            )
        if now - said > NEWS:
            print(f"  {title}: {now - began:.0f} s, not there yet", flush=True)
            said = now
        time.sleep(0.2)


def end(name: str) -> bool:
    """End it and all that it started; whether there was anything to end."""
    service = running(name)
    if service:
        child.end(service.pid)
    rest = end_leftovers(name)
    (FOLDER / f"{name}.json").unlink(missing_ok=True)
    return bool(service) or rest


def end_leftovers(name: str) -> bool:
    """What a killed service left behind, which still holds its port, say."""
    left = [process for process in psutil.process_iter() if _is_marked(process, name)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=child.GRACE)
    for process in stubborn:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(left)


def _is_marked(process: psutil.Process, name: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(MARK) == _mark(name)
    except (psutil.Error, OSError):
        return False


def _mark(name: str) -> str:
    return f"{name} of {ROOT}"


def one_at_a_time() -> AbstractContextManager[None]:
    """Two commands that start or end services would undo each other."""
    make_folder()
    return alone(FOLDER / "lock", lambda who: print(f"{who} starts or ends services here; waiting for it", flush=True))


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """Who listens on a port, in words; other users' processes are not ours to see."""
    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN and one.pid and tuple(one.laddr)[1:] == (port,):
                return f"process {one.pid} ({psutil.Process(one.pid).name()})"
    return "another program"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
