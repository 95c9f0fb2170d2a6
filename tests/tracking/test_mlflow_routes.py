"""MLflow's routes with our logins: what is not listed in tasks/tracking/mlflow_routes.py is refused, for everybody."""

import base64
import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from flask import Flask
from starlette.middleware.wsgi import WSGIMiddleware
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tasks.tracking.mlflow_gate import Gate
from tasks.tracking.mlflow_routes import EMPTY, SERVED, WITHOUT_LOGIN, may
from tests.support.fork_server import ADDRESS, fresh
from tests.support.mlflow_logins import PASSWORDS, mlflow_with_logins
from tests.support.workspaces import PROJECT

ASSISTANT = "/ajax-api/3.0/mlflow/assistant"
REFUSAL = "mlflow_routes.py"
Shape = tuple[str, str]  # method and path, with * for a placeholder and ** for one that takes a path

# Mounted, and refused to everybody. Whole parts of MLflow that we do not use ...
UNUSED = [
    r"/ajax-api/3.0/mlflow/(assistant|jobs|scorer|genai|demo)/.*",  # run code on the server
    r"/api/3.0/mlflow/(scorers|prompt-optimization|gateway)/.*",
    r"/ajax-api/3.0/jobs/.*",
    r"/gateway/.*",  # calls other models with the keys that it holds
    r"/api/3.0/mlflow/mcp-servers(/.*)?",
    r"/api/3.0/mlflow/(datasets|label-schemas|review-queues)/.*",
    r"/api/3.0/mlflow/(issues|workspaces)(/.*)?",
    r"/ajax-api/3.0/mlflow/ui-telemetry",
    r"/build/.*",
]
# ... and single routes beside those that we do.
SINGLE = """
GET /graphql
POST /ajax-api/2.0/mlflow/gateway-proxy
POST /ajax-api/2.0/mlflow/runs/create-promptlab-run
POST /ajax-api/2.0/mlflow/upload-artifact
POST /ajax-api/3.0/mlflow/issues/invoke
POST /api/2.0/mlflow/artifacts/presigned-download-url
POST /api/2.0/mlflow/artifacts/presigned-upload-url
POST /api/2.0/mlflow/logged-models
PATCH,DELETE /api/2.0/mlflow/logged-models/*
POST /api/2.0/mlflow/logged-models/*/params
PATCH /api/2.0/mlflow/logged-models/*/tags
DELETE /api/2.0/mlflow/logged-models/*/tags/*
POST /api/2.0/mlflow/model-versions/transition-stage
POST /api/2.0/mlflow/runs/log-model
POST /api/2.0/mlflow/runs/outputs
GET /api/2.0/mlflow/get-online-trace-details
GET /api/2.0/mlflow/unified-traces
GET,POST /api/2.0/mlflow/traces
PATCH /api/2.0/mlflow/traces/*
GET /api/2.0/mlflow/traces/*/info
PATCH,DELETE /api/2.0/mlflow/traces/*/tags
POST /api/2.0/mlflow/traces/link-prompts
POST /api/2.0/mlflow/traces/link-to-run
POST /api/2.0mlflow/experiments/search-datasets
"""
ENUMERATE = """
import json, os, sys
from tasks.tracking.mlflow_server import configure, make_users
configure(f"sqlite:///{sys.argv[1]}/users.db")
make_users(json.loads(sys.argv[2]))
os.environ["_MLFLOW_SGI_NAME"] = "uvicorn"
from fastapi.routing import iter_route_contexts
from mlflow.server import app, auth
native = [(method, route.path) for route in iter_route_contexts(auth.create_app(app).routes) if route.path
          for method in route.methods or ["SOCKET OR MOUNT"]]
print(json.dumps(native + [(m, rule.rule) for rule in app.url_map.iter_rules() for m in rule.methods]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow-logins")


@pytest.fixture(scope="module")
def server(home: Path, mlflow_store: Path) -> Iterator[str]:
    """With a home of its own, where the assistant would keep its configuration."""
    (home / "user").mkdir()
    with mlflow_with_logins(home, mlflow_store, HOME=str(home / "user"), **{ADDRESS: ""}) as address:
        yield address


def shape(method: str, path: str) -> Shape:
    """One for both applications' notations."""
    path = re.sub(r"<path:\w+>|\{\w+:path\}", "**", path)
    return method, re.sub(r"<\w+>|\{\w+\}", "*", path)


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> set[Shape]:
    """What MLflow's app with logins mounts as it comes, without our gate."""
    folder = tmp_path_factory.mktemp("mounted")
    env = fresh({**os.environ, "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/mlflow.db"})
    command = [sys.executable, "-c", ENUMERATE, str(folder), json.dumps(PASSWORDS)]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=True, timeout=300)
    found = {shape(*route) for route in json.loads(done.stdout.splitlines()[-1])}
    return {route for route in found if route[0] not in ("HEAD", "OPTIONS")}  # Flask adds them to each


def ask(server: str, user: str | None, method: str, path: str, body: Any = None, **more: str) -> tuple[int, str]:
    """Status and text of a response to a request whose path is sent as it is."""
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json"}
    if user:
        login = base64.b64encode(f"{user}:{PASSWORDS.get(user, 'guess')}".encode()).decode()
        headers["Authorization"] = f"Basic {login}"
    connection.putrequest(method, path)
    content = b"" if body is None else json.dumps(body).encode()
    for name, value in [*headers.items(), *more.items(), ("Content-Length", str(len(content)))]:
        connection.putheader(name, value)
    connection.endheaders(content)
    with connection.getresponse() as response:
        return response.status, response.read().decode(errors="replace")


@contextmanager
def model_that_calls_a_shell(command: str) -> Iterator[str]:
    """The address of a server that answers as Ollama does, first with a call of the tool Bash."""
    call = {"index": 0, "id": "c1", "type": "function"}
    call["function"] = {"name": "Bash", "arguments": json.dumps({"command": command})}
    turns = iter([{"tool_calls": [call]}])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(json.dumps({"models": [{"model": "m"}]}))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            delta = next(turns, {"content": "done"})
            reason = "tool_calls" if "tool_calls" in delta else "stop"
            chunk = {"choices": [{"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": reason}]}
            self.send(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "text/event-stream")

        def send(self, text: str, kind: str = "application/json") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("user", PASSWORDS)
def test_no_login_gets_a_shell_through_the_assistant(user: str, server: str, tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    with model_that_calls_a_shell(f"touch {mark}") as model:
        ollama = {"model": "m", "base_url": model, "selected": True, "permissions": {"full_access": True}}
        answers = [ask(server, user, "PUT", f"{ASSISTANT}/config", {"providers": {"ollama": ollama}})]
        answers.append(ask(server, user, "POST", f"{ASSISTANT}/message", {"message": "hello"}))
        stream = json.loads(answers[-1][1]).get("stream_url", f"{ASSISTANT}/sessions/x/stream")
        answers.append(ask(server, user, "GET", stream))
    assert not mark.exists()
    assert [status for status, _ in answers] == [403, 403, 403], answers


def single() -> set[Shape]:
    lines = [line.split() for line in SINGLE.strip().splitlines()]
    return {(method, path) for methods, path in lines for method in methods.split(",")}


def names_of(route: Shape) -> list[Any]:
    """The entries of UNUSED and SINGLE for a route. Pages have a copy of each client's route."""
    method, path = route
    paths = {path, path.replace("/ajax-api/", "/api/", 1)}
    families = [family for family in UNUSED if any(re.fullmatch(family, each) for each in paths)]
    return families + [(method, each) for each in paths if (method, each) in single()]


@pytest.mark.slow
def test_each_mounted_route_is_listed_or_known_and_nothing_else_is_listed(mounted: set[Shape]) -> None:
    """After an upgrade: list a new route if a login needs it, else name it here. It is refused in both cases."""
    listed = {shape(*route) for route in SERVED.union(EMPTY) if route[0] != "HEAD"}
    known = {route: names for route in mounted if (names := names_of(route))}
    assert listed - mounted == set()
    assert mounted - listed - known.keys() == set()
    assert listed & known.keys() == set()
    assert {*UNUSED, *single()} - {name for names in known.values() for name in names} == set()


@pytest.mark.slow
@pytest.mark.parametrize("user", [None, "guest", *PASSWORDS])
def test_a_login_reaches_the_routes_that_are_listed_for_it_and_no_other(
    user: str | None, server: str, mounted: set[Shape]
) -> None:
    """`guest` has no valid password."""
    known = user if user in PASSWORDS else None
    allowed = {shape(*route) for route in SERVED if known and may(known, route)}
    allowed |= {*EMPTY} if known else set()
    free = {shape(*route) for route in WITHOUT_LOGIN}
    assert ask(server, user, "HEAD", "/health") == (200, "")
    wrong = []
    for method, path in sorted(mounted):
        sample = path.replace("**", "x1/y1").replace("*", "x1")
        status, text = ask(server, user, method, sample, None if method == "GET" else {})
        refused = status == 401 or (status == 403 and REFUSAL in text)
        if refused == ((method, path) in allowed | free) or (refused and (status == 401) == bool(known)):
            wrong.append((method, sample, status))
    assert wrong == []


TARGETS = [
    ("PUT", f"{ASSISTANT}/config"),
    ("GET", f"{ASSISTANT}/config"),
    ("GET", "/api/3.0/mlflow/gateway/secrets/list"),
]
SPELLINGS = [
    lambda path: f"{path}/",
    lambda path: f"/{path}",
    lambda path: path.replace("/mlflow", "//mlflow"),
    lambda path: path.replace("/mlflow", "/./mlflow"),
    lambda path: path.replace("/mlflow", "/x/../mlflow"),
    lambda path: path.replace("/mlflow", "/%2e%2e/3.0/mlflow"),
    lambda path: path.replace("/mlflow", "%2fmlflow"),
    lambda path: path.replace("mlflow", "mlflo%77"),
    lambda path: path.upper(),
    lambda path: path.replace("mlflow", "MLflow"),
    lambda path: f"{path};x=/health",
    lambda path: f"{path}?x=/health",
    lambda path: f"{path}%00",
    lambda path: f"/health/..{path}",
    lambda path: f"/static-files/..{path}",
    lambda path: f"/static-files/%2e%2e{path}",
    lambda path: path.replace("/", "\\"),
    lambda path: f"http://other{path}",
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), TARGETS)
def test_no_other_spelling_of_a_path_or_method_passes(method: str, path: str, server: str, home: Path) -> None:
    body = {"providers": {"ollama": {"model": "m", "selected": True}}} if method == "PUT" else None
    for spell in SPELLINGS:
        status, text = ask(server, "admin", method, spell(path), body)
        assert status in (400, 403, 404), (spell(path), status, text)
        assert "providers" not in text
        assert "secrets_" not in text
    for other in ("HEAD", "OPTIONS", "TRACE", method.lower(), "PROPFIND"):
        assert ask(server, "admin", other, path, body)[0] in (400, 403), other
    overridden = {"X-HTTP-Method-Override": method, "X-Original-URL": path, "X-Forwarded-Prefix": "/health"}
    assert ask(server, "admin", "POST", path, body, **overridden)[0] == 403
    assert not list((home / "user").rglob("config.json"))


@pytest.mark.slow
def test_a_login_is_read_once(server: str) -> None:
    """From one header, of the scheme Basic."""
    path = "/api/2.0/mlflow/users/list"
    admin = base64.b64encode(f"admin:{PASSWORDS['admin']}".encode()).decode()
    for value in (f"Bearer {admin}", "Basic", "Basic !", f"Digest {admin}", f"Basic {admin[:-4]}", admin):
        assert ask(server, None, "GET", path, Authorization=value)[0] == 401, value
    assert ask(server, None, "GET", path, Authorization=f"Basic {admin}")[0] == 200
    assert ask(server, "reader", "GET", path, authorization=f"Basic {admin}")[0] == 401  # two headers
    assert (
        ask(server, None, "GET", "/gateway/mlflow/v1/models", **{"X-MLflow-Authorization": f"Basic {admin}"})[0] == 401
    )


@pytest.mark.slow
def test_the_gate_itself_says_that_there_is_no_gateway(server: str) -> None:
    path = "/ajax-api/2.0/mlflow/gateway-proxy?gateway_path=api/2.0/endpoints/"
    assert ask(server, "reader", "GET", path) == (200, '{"endpoints":[]}')


@pytest.mark.slow
def test_no_socket_opens(server: str) -> None:
    admin = base64.b64encode(f"admin:{PASSWORDS['admin']}".encode()).decode()
    with pytest.raises(InvalidStatus, match="403"):
        connect(server.replace("http", "ws"), additional_headers={"Authorization": f"Basic {admin}"})


def test_what_an_upgrade_adds_is_refused_also_where_it_hides_a_listed_route() -> None:
    """Applications like MLflow's: FastAPI's routes come first, Flask has the rest. The login is the admin's."""
    flask, app = Flask("flask"), FastAPI()
    for rule in ("/api/2.0/mlflow/users/list", "/api/2.0/mlflow/runs/get", "/api/2.0/mlflow/new"):
        flask.add_url_rule(rule, rule, lambda: "served by Flask")
    app.get("/api/2.0/mlflow/users/{name}")(lambda name: "served by FastAPI")
    app.mount("/", WSGIMiddleware(flask))

    class OfAdmin(Gate):
        def user(self, authorization: str) -> str | None:
            return "admin"

    with TestClient(OfAdmin(app, flask), headers={"Authorization": "Basic x"}) as client:
        found = {rule: client.get(f"/api/2.0/mlflow/{rule}").status_code for rule in ("users/list", "runs/get", "new")}
    assert found == {"users/list": 403, "runs/get": 200, "new": 403}


def test_a_user_whom_the_admin_added_may_read() -> None:
    assert may("ida", ("GET", "/api/2.0/mlflow/runs/get"))
    assert not may("ida", ("POST", "/api/2.0/mlflow/runs/create"))
