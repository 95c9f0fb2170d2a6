"""The Prefect server of a run by hand: that of `make up` where it runs; otherwise an embedded one, on a loopback port,
in a group of its own, gone when we are.

Prefect's own temporary server shares our process group, so that Ctrl-C ends it first and the run then waits for it
for ever, and it stays behind after `kill -9`. This is the same server, started as flows/child.py starts things.
"""

import atexit
import os
import secrets
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_HOME, PREFECT_UI_URL, temporary_settings

from flows import ROOT, child, passwords, services
from flows.services import free_port
from tasks.machines.lock import alone

PATIENCE = 120.0  # seconds; the first start makes a database
COMMAND = ["-m", "uvicorn", "--factory", "flows.api:create_app", "--host", "127.0.0.1"]
SERVER = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}
PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"

_embedded = False


def embedded() -> bool:
    """Whether the server is our own, whose pages nobody can open."""
    return _embedded


def flow_page(flow_run: str | None) -> str:
    """Where Prefect shows a run; nowhere where the server is our own and goes with us."""
    if not flow_run or embedded():
        return ""
    pages = PREFECT_UI_URL.value() or (PREFECT_API_URL.value() or "").removesuffix("/api")
    return f"{pages}/runs/flow-run/{flow_run}"


def start() -> None:
    """Start a server and wait until it answers, unless one is configured or `make up` has one."""
    global _embedded
    if os.environ.get("PREFECT_API_URL") or _take_that_of_make_up():
        return
    if PREFECT_API_URL.value() and PREFECT_API_URL.value() != passwords.client_api():  # not of a server that is gone
        return
    _embedded = True
    print("Starting Prefect's embedded server", flush=True)
    with alone(Path(PREFECT_HOME.value()) / "start.lock", lambda who: None):  # the first makes the database
        _start()


def _start() -> None:
    log = Path(PREFECT_HOME.value()) / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, *COMMAND, "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    stack = ExitStack()
    atexit.register(stack.close)  # and no earlier: Prefect sends the last logs and states when the interpreter ends
    output = stack.enter_context(log.open("w"))
    login = f"run:{secrets.token_urlsafe(24)}"  # another user of this machine reaches the port, too
    process = stack.enter_context(child.started(command, ROOT, {**os.environ, **SERVER, PASSWORD: login}, output))
    api = f"http://127.0.0.1:{port}/api"
    wait_until_it_answers(process, api, log)
    stack.enter_context(temporary_settings({PREFECT_API_URL: api, PREFECT_API_AUTH_STRING: login}))


def _take_that_of_make_up() -> bool:
    """So that a run by hand is seen on its pages, and two servers do not share one database."""
    server = services.running("prefect")
    if server is None or not server.answers():
        return False
    access = services.prefect_access(server)
    print(f"This run is on {server.address}", flush=True)
    stack = ExitStack()
    atexit.register(stack.close)
    login = access["PREFECT_API_AUTH_STRING"]
    stack.enter_context(
        temporary_settings({PREFECT_API_URL: access["PREFECT_API_URL"], PREFECT_API_AUTH_STRING: login})
    )
    return True


def wait_until_it_answers(process: subprocess.Popen[str], api: str, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not services.answers(f"{api}/health"):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"Prefect's embedded server did not start. It wrote to {log}:\n{log.read_text()}")
        time.sleep(0.1)
