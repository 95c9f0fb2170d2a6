"""The Prefect server of `dpo run`: the one of `dpo up` if it runs, otherwise an embedded one on a loopback port.

Prefect's own temporary server shares our process group: Ctrl-C ends it first, the run then waits for it for ever, and
`kill -9` leaves it behind. Ours is the same server, started by tasks/system/processes.py, and ends with us.
"""

import atexit
import os
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_HOME, PREFECT_UI_URL, temporary_settings

from services import background, health, passwords, prefect_api, prefect_internals
from tasks.config.paths import ROOT
from tasks.system import http_limits, processes
from tasks.system.lock import exclusive
from tasks.system.ports import free_port

TIMEOUT = 600.0  # seconds; a server that ended is noticed at once, so this is for a busy machine
COMMAND = ["-m", "uvicorn", "--factory", "services.prefect_sqlite:create_app", "--host", "127.0.0.1"]
COMMAND += ["--http", http_limits.NAME]
SERVER = {**prefect_internals.EMBEDDED, "PREFECT_UI_ENABLED": "0"}
PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"

_embedded = False
_until_exit = ExitStack()  # not closed earlier: Prefect sends the last logs and states when the interpreter exits
atexit.register(_until_exit.close)


def embedded() -> bool:
    """Whether the server is embedded, so that nobody can open its pages."""
    return _embedded


def flow_page(flow_run: str | None) -> str:
    """Prefect's page of a flow run; empty if the server is embedded."""
    if not flow_run or embedded():
        return ""
    pages = PREFECT_UI_URL.value() or (PREFECT_API_URL.value() or "").removesuffix("/api")
    return f"{pages}/runs/flow-run/{flow_run}"


def start() -> None:
    """Start a server and wait until it answers, unless one is configured or `dpo up` runs one."""
    global _embedded
    if os.environ.get("PREFECT_API_URL") or _use_server_of_dpo_up():
        return
    configured = PREFECT_API_URL.value()
    if configured and configured != passwords.client_api_url():  # that one would be a `dpo up` that has ended
        return
    _embedded = True
    print("Starting Prefect's embedded server", flush=True)
    with exclusive(Path(PREFECT_HOME.value()) / "start.lock", lambda holder: None):  # the first creates the database
        _start()


def _start() -> None:
    log = Path(PREFECT_HOME.value()) / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, *COMMAND, "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    login = f"run:{secrets.token_urlsafe(24)}"  # other users of this machine can reach the port, too
    env = {**os.environ, **SERVER, PASSWORD: login}
    process = _until_exit.enter_context(processes.spawn(command, ROOT, env, _until_exit.enter_context(log.open("w"))))
    api = f"http://127.0.0.1:{port}/api"
    wait_until_healthy(process, api, log)
    _connect(api, login)


def _connect(api: str, login: str) -> None:
    _until_exit.enter_context(temporary_settings({PREFECT_API_URL: api, PREFECT_API_AUTH_STRING: login}))


def _use_server_of_dpo_up() -> bool:
    """So that its pages show the run, and two servers do not share one database."""
    server = background.running("prefect")
    if server is None or not server.is_healthy():
        return False
    access = prefect_api.access_variables(server)
    print(f"Using the Prefect server at {server.address}", flush=True)
    _connect(access["PREFECT_API_URL"], access["PREFECT_API_AUTH_STRING"])
    return True


def wait_until_healthy(process: subprocess.Popen[str], api: str, log: Path) -> None:
    failure = "Prefect's embedded server did not start"
    health.wait_until_healthy(f"{api}/health", failure, log, lambda: process.poll() is None, TIMEOUT)
