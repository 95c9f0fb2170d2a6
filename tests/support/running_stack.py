"""A checkout in which `dpo up` runs, and what its tests ask of it."""

import base64
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil

from services import stack
from tasks.secrets.private import checkout_folder
from tests.support import workspaces

SILENCE = 60
PATIENCE = 400  # seconds, for a busy machine
wait_for = partial(workspaces.wait_for, pause=1.0)  # a request to a server takes it ten milliseconds


@dataclass
class Up:
    root: Path
    env: dict[str, str]
    notifications: list[str] = field(default_factory=list)  # received by the webhook
    first_output: str = ""  # of the first `dpo up`

    @property
    def forks_runs(self) -> Path:
        """While this file is there, the worker's runs do not import Prefect: tests/support/fork_server.py."""
        return self.root / ".scratch" / "forks"

    def dpo(self, name: str) -> str:
        command = [sys.executable, "-m", "cli", name]
        # Services are ordinary processes, and so are those of `down`, which ends them.
        env = self.env if name in ("up", "down") else {**self.env, "FORK_STAGES": "1"}
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=PATIENCE)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout

    def record(self, name: str) -> dict[str, Any]:
        return json.loads((self.root / ".services" / f"{name}.json").read_text())

    def pids(self) -> dict[str, int]:
        return {name: self.record(name)["pid"] for name in stack.TITLES}

    def login(self, name: str) -> str:
        """user:password of `prefect/admin`, `mlflow/reader` and the like."""
        return f"{name.partition('/')[2]}:{self._passwords()[name]}"

    def passwords(self) -> list[str]:
        return list(self._passwords().values())

    def _passwords(self) -> dict[str, str]:
        return dict(json.loads(self.password_file.read_text()))

    @property
    def password_file(self) -> Path:
        return checkout_folder(self.root) / "passwords.json"

    def request(self, url: str, body: Any, login: str | None, method: str | None = None, **headers: str) -> Any:
        """The open response."""
        if login:
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
        return urllib.request.urlopen(request, timeout=90)

    def api(self, path: str, body: Any = None, login: str | None = "prefect/admin", method: str | None = None) -> Any:
        who = login and self.login(login)
        with self.request(f"{self.record('prefect')['address']}/api/{path}", body, who, method) as answer:
            return json.loads(answer.read() or "null")

    def start(self, deployment: str, dummy: str = "", beta: float | None = None, **parameters: Any) -> str:
        entry = self.api(f"deployments/name/{deployment}")
        values = {**parameters, **self.misbehave(dummy, beta)}
        return str(self.api(f"deployments/{entry['id']}/create_flow_run", {"parameters": values})["id"])

    def misbehave(self, dummy: str, beta: float | None) -> dict[str, Any]:
        """Parameters of a run that the dummy stage knows by its beta; DVC has its training from no other run either."""
        if beta is None:
            return {}
        file = self.root / ".scratch" / "dummy.json"
        file.parent.mkdir(exist_ok=True)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, str(beta): dummy}))
        return {"overrides": {"train.beta": beta}}

    def state(self, run: str) -> str:
        return str(self.api(f"flow_runs/{run}")["state_type"])


@contextmanager
def webhook(notifications: list[str]) -> Iterator[str]:
    """A real HTTP server that keeps the texts posted to it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            notifications.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret-path"
    finally:  # or the thread keeps a failed test's process alive
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def occupied(port: int) -> Iterator[None]:
    """Occupy a port, unless another program already does."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also just after a server that was there
        with suppress(OSError):
            holder.bind(("127.0.0.1", port))
            holder.listen()
        yield


def listens(pid: int) -> set[str]:
    """The addresses on which a process and its descendants listen."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


def cancel(up: Up, run: str) -> None:
    """As the button does."""
    up.api(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})


def following(up: Up, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "cli", "follow", *arguments]
    return subprocess.Popen(
        command,
        cwd=up.root,
        env={**up.env, "FORK_STAGES": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whoever runs tests in the background has Ctrl-C switched off, and we would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def hanging(up: Up, name: str, dummy: str, beta: float) -> tuple[str, list[int]]:
    """A run of dpo/full whose train stage hangs: with train:sessions with processes in sessions of their own, with
    train:sleep with one in its own; its id and their pids."""
    (up.root / ".scratch" / "pids").unlink(missing_ok=True)
    run = up.start("dpo/full", dummy, beta, name=name)
    return run, processes_of_hanging(up, 3 if dummy == "train:sessions" else 2)


def processes_of_hanging(up: Up, count: int) -> list[int]:
    pids = up.root / ".scratch" / "pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == count, PATIENCE)
    return list(map(int, pids.read_text().split()))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
