"""Every route of our own servers refuses who has no login, but for a few that are listed here."""

import asyncio
import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Gauge

from services.arena.app import create_app as arena_app
from services.arena.app import create_router
from services.metrics_endpoint import application
from services.serving import gateway, tokens
from services.serving.fleet import CHAMPION
from services.serving.tokens import RateLimit, Tokens
from tasks.feedback.journal import FeedbackJournal
from tests.support.arena import TOKEN, FixedAnswers

FREE = {
    "arena": {("GET", "/"), ("GET", "/page.js"), ("POST", "/api/logout")},
    "gateway": {("GET", "/health"), ("HEAD", "/health")},
    "metrics": {("GET", "/health"), ("HEAD", "/health")},
}
DOCUMENTATION = ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect")  # of FastAPI, on each app as it comes


def arena(folder: Path) -> FastAPI:
    return arena_app(
        create_router(FixedAnswers(), FeedbackJournal(folder), token=TOKEN, prompts=[], votes=[], overlap=0)
    )


def serving(folder: Path) -> FastAPI:
    fleet: Any = SimpleNamespace(engines={CHAMPION: SimpleNamespace(is_alive=True)})
    return gateway.create_app(fleet, Tokens(), FeedbackJournal(folder), RateLimit(10_000), 64, 60)


def metrics(_: Path) -> FastAPI:
    registry = CollectorRegistry()
    Gauge("dpo_secret", "a metric", registry=registry).set(7)
    return application(registry, "a-password")


@pytest.mark.parametrize(("name", "make"), [("arena", arena), ("gateway", serving), ("metrics", metrics)])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer guess"}, {"Cookie": "dpo_arena=616461.guess"}])
def test_every_route_that_is_not_listed_needs_a_login(
    name: str, make: Any, headers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tokens.VARIABLE, f"ann:{'a' * 16}")
    app = make(tmp_path)
    mounted = {
        (method, str(route.path)) for route in iter_route_contexts(app.routes) for method in route.methods or "?"
    }
    body = {"name": "ada", "token": "guess", "id": "a" * 32, "comparison": "b" * 32, "choice": "tie", "text": "?"}
    with TestClient(app) as client:
        for method, path in mounted:
            sent = {} if method == "GET" else {"json": body}
            answer = client.request(method, path, headers={"X-Arena": "1", **headers}, **sent)
            assert answer.status_code == (200 if (method, path) in FREE[name] else 401), (method, path, answer.text)
            if name == "arena" and method == "POST":  # another site's page cannot send the header
                assert client.post(path, json=body).status_code == 403
        assert [client.get(path).status_code for path in DOCUMENTATION] == [404] * len(DOCUMENTATION)
    assert mounted > FREE[name]


def respond(app: FastAPI, method: str, path: str, login: str = "") -> tuple[int, str]:
    """Status and text for exactly this path, which a client would tidy up."""
    sent = list[Any]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), *([(b"authorization", login.encode())] if login else [])]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT"])
def test_metrics_need_the_login_whatever_the_method_and_the_spelling(method: str, tmp_path: Path) -> None:
    app = metrics(tmp_path)
    refusals = {"/metrics": 401 if method == "GET" else 405, "/metrics/": 307}  # to /metrics
    for path in ("/metrics", "/metrics/", "//metrics", "/METRICS", "/health/../metrics", "/", "", "/favicon.ico"):
        for login in ("", basic("reader:guess"), basic("a-password"), basic(":a-password")):
            status, text = respond(app, method, path, login)
            assert (path, status) == (path, refusals.get(path, 404))
            assert "dpo_secret" not in text
    status, text = respond(app, method, "/metrics", basic("reader:a-password"))
    assert (status, "dpo_secret 7.0" in text) == ((200, True) if method == "GET" else (405, False))


def basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"
