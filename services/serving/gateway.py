"""The gateway: an OpenAI-compatible endpoint in front of the engines that keeps answers and takes feedback by id.

All routes below /v1 need a token.
"""

import math
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from services.http_app import plain_app
from services.serving.answer_index import AnswerIndex
from services.serving.completion import Completions, as_events, error_content, unless_gone, whole_answer
from services.serving.fleet import CHAMPION, Fleet
from services.serving.requests import ChatRequest, FeedbackRequest, read_body
from services.serving.tokens import RateLimit, Tokens, through
from services.serving.upstream import UPSTREAM, one_word
from services.serving.watchdog import Watchdog
from tasks.feedback.events import Feedback
from tasks.feedback.journal import FeedbackJournal


def create_app(
    fleet: Fleet, tokens: Tokens, journal: FeedbackJournal, limit: RateLimit, most_tokens: int, patience: float
) -> FastAPI:
    # Connections are not kept: one that the engine closes at that moment would fail a request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    client = httpx.AsyncClient(timeout=UPSTREAM, limits=limits, trust_env=False)
    watchdog = Watchdog(lambda engine: one_word(engine, client), patience)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = plain_app(lifespan=lifespan)
    app.add_exception_handler(AnyHTTPException, refuse)
    app.include_router(health_router(fleet))
    needs_token = Depends(RequireToken(tokens, limit))
    for router in (
        completion_router(fleet, Completions(fleet, client, watchdog, journal, most_tokens)),
        feedback_router(fleet, tokens, journal),
    ):
        app.include_router(router, prefix="/v1", dependencies=[needs_token])
    return app


async def refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, AnyHTTPException)
    return JSONResponse(error_content(error), error.status_code, error.headers)


class RequireToken:
    """A valid token, within its rate limit. `request.state.caller` becomes its owner."""

    def __init__(self, tokens: Tokens, limit: RateLimit) -> None:
        self.tokens, self.limit = tokens, limit

    async def __call__(self, request: Request) -> None:
        name = self.tokens.owner(request.headers.get("authorization", ""))
        if name is None:
            raise HTTPException(401, "A valid bearer token is required.", {"WWW-Authenticate": "Bearer"})
        if seconds := self.limit.wait(name):
            after = {"Retry-After": str(math.ceil(seconds))}
            raise HTTPException(429, f"Too many requests: at most {self.limit.capacity:.0f} a minute.", after)
        request.state.caller = name


def health_router(fleet: Fleet) -> APIRouter:
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"])  # some probes ask with HEAD
    async def health() -> Response:
        is_well = fleet.engines[CHAMPION].is_alive
        return JSONResponse({"status": "ok" if is_well else "starting"}, 200 if is_well else 503)

    return router


def completion_router(fleet: Fleet, completions: Completions) -> APIRouter:
    router, started = APIRouter(), int(time.time())

    @router.get("/models")
    async def models() -> dict[str, Any]:
        targets = [engine.target for engine in fleet.engines.values()]
        names = dict.fromkeys([targets[0].model, *(target.name for target in targets)])
        entries = [{"id": name, "object": "model", "created": started, "owned_by": "dpo"} for name in names]
        return {"object": "list", "data": entries}

    @router.post("/chat/completions")
    async def complete(request: Request) -> Response:
        chat = await read_body(request, ChatRequest)
        chunks = completions.answer(chat, request.state.caller)
        first = await unless_gone(request, anext(chunks))
        content = first if first is None or chat.stream else await unless_gone(request, whole_answer(first, chunks))
        if first is None or content is None:
            return Response(status_code=499)  # the client has gone
        headers = {"X-DPO-Answer-Id": first["id"]}
        if chat.stream:
            return StreamingResponse(as_events(first, chunks), media_type="text/event-stream", headers=headers)
        return JSONResponse(content, headers=headers)

    return router


def feedback_router(fleet: Fleet, tokens: Tokens, journal: FeedbackJournal) -> APIRouter:
    router, index = APIRouter(), AnswerIndex(journal.folder)

    @router.post("/feedback")
    async def give_feedback(request: Request) -> dict[str, str]:
        body, name = await read_body(request, FeedbackRequest), request.state.caller
        if body.user != name and body.user in tokens.names:
            raise HTTPException(403, f"{body.user} has a token, and votes with it.")
        vote = body.model_dump(include={"kind", "value", "other"}) | {"through": through(name)}
        event = Feedback(id=uuid.uuid4().hex, time=time.time(), answer=body.answer_id, rater=body.user or name, **vote)
        for answer_id in filter(None, (event.answer, event.other)):
            if not await run_in_threadpool(index.knows, answer_id):
                raise HTTPException(404, f"There is no answer {answer_id}.")
        try:
            await run_in_threadpool(journal.append, event)  # on disk when it returns
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except OSError as error:
            raise HTTPException(503, f"The feedback could not be stored: {error}", {"Retry-After": "60"}) from error
        return {"id": event.id}

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        running = {engine.target.name: engine.running for engine in fleet.engines.values()}
        return {**await run_in_threadpool(index.stats), "running": running}

    return router
