"""Every route of our own servers refuses who has no login, but for a few that are listed here."""

from collections.abc import Iterator
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
    "gateway": {("GET", "/health")},
}
DOCUMENTATION = ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect")  # of FastAPI, on each app as it comes


def arena(folder: Path) -> FastAPI:
    return arena_app(
        create_router(FixedAnswers(), FeedbackJournal(folder), token=TOKEN, prompts=[], votes=[], overlap=0)
    )


def serving(folder: Path) -> FastAPI:
    fleet: Any = SimpleNamespace(engines={CHAMPION: SimpleNamespace(is_alive=True)})
    return gateway.create_app(fleet, Tokens(), FeedbackJournal(folder), RateLimit(10_000), 64)


@pytest.mark.parametrize(("name", "make"), [("arena", arena), ("gateway", serving)])
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


def respond(app: Any, method: str, path: str, **environ: str) -> Iterator[str]:
    """The status, then the text."""
    statuses = list[str]()
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": "", **environ}
    parts = app(environ, lambda status, headers, *_: statuses.append(status[:3]))
    yield statuses[0]
    yield b"".join(parts).decode()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT"])
def test_metrics_need_the_login_whatever_the_method_and_the_spelling(method: str) -> None:
    registry = CollectorRegistry()
    Gauge("dpo_secret", "a metric", registry=registry).set(7)
    app = application(registry, "a-password")
    for path in ("/metrics", "/metrics/", "//metrics", "/METRICS", "/health/../metrics", "/", "", "/favicon.ico"):
        for login in ({}, {"HTTP_AUTHORIZATION": "Basic cmVhZGVyOmd1ZXNz"}):
            status, text = respond(app, method, path, **login)
            assert status == ("401" if path == "/metrics" else "404")
            assert "dpo_secret" not in text
    assert [*respond(app, method, "/health")] == ["200", "ok\n"]
