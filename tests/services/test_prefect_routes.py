"""Prefect's routes: without the login its server shows its pages, which ask for it, and its health."""

import base64
import http.client
import json
import os
import re
import subprocess
import sys
import uuid

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from tests.support.fork_server import fresh
from tests.support.workspaces import PROJECT

pytestmark = pytest.mark.slow
Env = dict[str, str]
Route = tuple[str, str]
FREE = {("GET", "/api/health"), ("GET", "/api/ready"), ("GET", "/ui-settings")}
SOCKET = "SOCKET"
ENUMERATE = """
import json
from fastapi.routing import iter_route_contexts
from prefect.server.api import server

def routes(app, prefix=""):
    for route in iter_route_contexts(app.routes):
        below, path = getattr(route.original_route, "app", None), prefix + (route.path or "")
        if hasattr(below, "routes"):
            yield from routes(below, path)
        elif route.path is not None:
            yield from ((method, path) for method in route.methods or ["SOCKET" if route.endpoint else "FILES"])

print(json.dumps(list(routes(server.create_app()))))
"""


@pytest.fixture(scope="module")
def mounted(prefect_api: Env) -> set[Route]:
    """What Prefect's server mounts as it comes, without our gate."""
    command, env = [sys.executable, "-c", ENUMERATE], fresh({**os.environ, **prefect_api})
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=True, timeout=300)
    return {(method, path) for method, path in json.loads(done.stdout.splitlines()[-1])}


def ask(server: Env, method: str, path: str, login: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address(server), timeout=60)
    headers = {"Content-Type": "application/json", "Accept": "text/html, */*"}
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    connection.request(method, path, None if method in ("GET", "HEAD") else "{}", headers)
    with connection.getresponse() as response:
        return response.status, response.read().decode(errors="replace")


def address(server: Env) -> str:
    return server["PREFECT_API_URL"].removeprefix("http://").removesuffix("/api")


def sample(path: str) -> str:
    return re.sub(r"\{\w+\}", "x", re.sub(r"\{\w+:uuid\}", str(uuid.uuid4()), re.sub(r"\{\w+:str\}", "x", path)))


@pytest.mark.parametrize("login", [None, "tests:guess"])
def test_every_route_but_the_listed_ones_needs_the_login(
    login: str | None, mounted: set[Route], prefect_api: Env
) -> None:
    """Those of the pages' application and of FastAPI's documentation, too."""
    assert {("GET", "/docs"), ("GET", "/api/docs"), ("GET", "/api/metrics"), ("FILES", "/api/static")} <= mounted
    wrong = []
    for method, path in sorted(mounted):
        if method == SOCKET:
            continue
        sent, where = ("GET", f"{path}/prefect-logo-mark-gradient.png") if method == "FILES" else (method, sample(path))
        status, _ = ask(prefect_api, sent, where, login)
        if status != 200 if (method, path) in FREE else status != 401:
            wrong.append((sent, where, status))
    assert wrong == []
    assert mounted >= FREE


def test_the_pages_come_without_a_login_and_the_rest_with_it(prefect_api: Env) -> None:
    login = prefect_api["PREFECT_API_AUTH_STRING"]
    for page in ("/", "/v2/", "/runs/flow-run/x", "/favicon.ico"):
        assert ask(prefect_api, "GET", page)[0] in (200, 307), page
    for path in ("/docs", "/openapi.json", "/api/docs", "/api/admin/settings", "/api/metrics"):
        assert ask(prefect_api, "GET", path, login)[0] == 200, path
    assert ask(prefect_api, "POST", "/api/flows/filter", login)[0] == 200


@pytest.mark.parametrize("path", ["/api/admin/settings", "/api/metrics", "/openapi.json"])
def test_no_other_spelling_of_a_path_passes(path: str, prefect_api: Env) -> None:
    spellings = [f"/{path}", f"{path}/", f"{path}/health", f"{path}?x=/api/health", f"{path};/api/health", path.upper()]
    spellings += [f"/api/health/..{path}", f"/x/..{path}", f"/./{path}", f"/%2e{path}", path.replace("/", "//")]
    spellings += [path.replace("/api", "/api/x/.."), path.replace("/", "%2f"), path[:-1] + f"%{ord(path[-1]):x}"]
    for spelling in [*spellings, f"http://other{path}"]:
        for method in ("GET", "POST"):
            status, text = ask(prefect_api, method, spelling if "://" in spelling else f"/{spelling.removeprefix('/')}")
            assert status in (307, 400, 401, 404, 405) or "<!doctype html>" in text.lower(), (
                method,
                spelling,
                status,
                text,
            )
        assert ask(prefect_api, "OPTIONS", path)[0] in (400, 401, 405)


def test_every_socket_needs_the_login(mounted: set[Route], prefect_api: Env) -> None:
    sockets = [path for method, path in mounted if method == SOCKET]
    assert sockets
    for path in sockets:
        where = f"ws://{address(prefect_api)}{sample(path)}"
        with pytest.raises(InvalidStatus, match="403"):
            connect(where)
        for token in (None, "guess"):
            with connect(where, subprotocols=[Subprotocol("prefect")]) as socket:
                socket.send(json.dumps({"type": "auth", "token": token}))
                with pytest.raises(ConnectionClosed):
                    socket.recv(timeout=30)


def test_the_server_does_not_start_without_a_login(prefect_api: Env) -> None:
    env = {name: value for name, value in fresh({**os.environ, **prefect_api}).items() if "AUTH_STRING" not in name}
    command = [sys.executable, "-m", "services.prefect_sqlite", "server", "start", "--host", "127.0.0.1", "--port", "1"]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "error: PREFECT_SERVER_API_AUTH_STRING is not set" in done.stderr
