"""Half requests, slow bodies and too many connections, in front of real servers."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect

from flows.embedded_server import COMMAND
from services.health import is_healthy
from tasks.system import http_limits, processes
from tasks.system.ports import free_port
from tasks.tracking.mlflow_server import USERS
from tests.support.workspaces import PROJECT, wait_for

HEAD = b"GET /quick HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(http_limits, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(http_limits, "BODY_SECONDS", 0.5)
    app, port = FastAPI(), free_port()

    @app.get("/quick")
    async def quick() -> str:
        return "ok"

    @app.get("/slow")
    def slow() -> str:
        time.sleep(1.5)
        return "late"

    @app.post("/count")
    async def count(request: Request) -> int:
        try:
            return len(await request.body())
        except ClientDisconnect:
            return -1

    options: Any = {"port": port, "log_level": "warning", "http": http_limits.LimitedProtocol}
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started, 30)
    yield port
    server.should_exit = True
    thread.join()


def connect(port: int, content: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=10)
    made.sendall(content)
    return made


def drip(connection: socket.socket) -> None:
    """A byte at a time, for five seconds."""
    for _ in range(100):
        connection.sendall(b"a")
        time.sleep(0.05)


def ending(connection: socket.socket) -> bytes:
    """What the server says until it closes the connection; a TimeoutError if it does not."""
    said = b""
    with suppress(ConnectionResetError):  # it had not read everything
        while piece := connection.recv(65536):
            said += piece
    return said


@pytest.mark.parametrize("content", [b"", b"G", HEAD, HEAD + b"X-A: " + b"a" * 1000, POST + b"x"])
def test_half_a_request_is_closed(port, content):
    with connect(port, content) as connection:
        assert ending(connection).startswith(b"HTTP/1.1 408")


def test_half_a_request_after_whole_ones_is_closed(port):
    with connect(port, HEAD + b"\r\n") as connection:
        time.sleep(0.2)
        connection.sendall(HEAD)
        said = ending(connection)
        assert b'"ok"' in said
        assert b"HTTP/1.1 408" in said
    with connect(port, HEAD + b"\r\n" + POST + b"x") as connection:  # both at once
        assert b"HTTP/1.1 408" in ending(connection)


def test_a_dripping_head_and_a_dripping_body_are_closed(port):
    for start in (HEAD, POST):
        with connect(port, start) as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
            drip(connection)


def test_an_answer_and_a_steady_body_may_take_longer(port):
    with connect(port, b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as connection:
        assert b'"late"' in ending(connection)
    with connect(port, POST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")) as connection:
        for _ in range(10):
            connection.sendall(b"x" * 10_000)
            time.sleep(0.15)
        assert b"100000" in ending(connection)


def test_half_requests_keep_nobody_out_and_whole_ones_have_a_limit(port, monkeypatch):
    monkeypatch.setattr(http_limits, "MOST_CONNECTIONS", 50)
    monkeypatch.setattr(http_limits, "HEAD_SECONDS", 60)
    with ExitStack() as stack:
        half = [stack.enter_context(connect(port, HEAD)) for _ in range(200)]
        began = time.monotonic()
        with connect(port, HEAD + b"Connection: close\r\n\r\n") as connection:
            assert b'"ok"' in ending(connection)
        assert time.monotonic() - began < 5
        assert b"200 OK" not in ending(half[0])  # the longest wait went first
        half[-1].sendall(b"Connection: close\r\n\r\n")
        assert b'"ok"' in ending(half[-1])
    with ExitStack() as stack:
        asked = b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        busy = [stack.enter_context(connect(port, asked)) for _ in range(60)]
        said = [ending(connection) for connection in busy]
    assert sum(b'"late"' in text for text in said) == 50


def closes_half_a_request(address: str) -> None:
    port = int(address.split("//")[1].split("/")[0].split(":")[1])
    with connect(port, HEAD) as connection:
        connection.settimeout(http_limits.HEAD_SECONDS + 10)
        assert ending(connection).startswith(b"HTTP/1.1 408")


@pytest.mark.slow
def test_mlflows_server_has_the_limits(tmp_path):
    """By UVICORN_HTTP, which uvicorn's command reads."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "tasks.tracking.mlflow_server", "--host", "127.0.0.1", "--port", str(port)]
    passwords = {f"DPO_MLFLOW_{user.upper()}_PASSWORD": f"a-password-of-{user}" for user in USERS}
    env = {**os.environ, **passwords, "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/mlflow.db", "FORK_STAGES": "1"}
    env |= {"DPO_MLFLOW_USERS": f"sqlite:///{tmp_path}/users.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (tmp_path / "log").open("w") as log, processes.spawn([*command, "--workers", "1"], PROJECT, env, log):
        wait_for(lambda: is_healthy(f"{address}/health"), 300)
        closes_half_a_request(address)


@pytest.mark.slow
def test_prefects_servers_have_the_limits(prefect_api):
    closes_half_a_request(prefect_api["PREFECT_API_URL"])
    assert COMMAND[-2:] == ["--http", http_limits.NAME]  # the embedded one is started by uvicorn's command
