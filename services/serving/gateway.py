"""The gateway: an OpenAI-compatible endpoint in front of the engines that keeps answers and takes feedback by id."""

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

import httpx
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from services.serving.answer_index import AnswerIndex
from services.serving.fleet import CHAMPION, Fleet, unavailable
from services.serving.requests import ChatRequest, FeedbackRequest, read_body
from services.serving.tokens import RateLimit, Tokens, through
from services.serving.upstream import ENDED, UPSTREAM, Chunks, ask, one_word, prompt_tokens
from services.serving.watchdog import Watchdog
from tasks.feedback.events import Answer, Feedback
from tasks.feedback.journal import FeedbackJournal


def create_app(
    fleet: Fleet, tokens: Tokens, journal: FeedbackJournal, limit: RateLimit, most_tokens: int, patience: float
) -> FastAPI:
    # Connections are not kept: one that the engine closes at that moment would fail a request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    client = httpx.AsyncClient(timeout=UPSTREAM, limits=limits, trust_env=False)
    index, started = AnswerIndex(journal.folder), int(time.time())
    watchdog = Watchdog(lambda engine: one_word(engine, client), patience)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(AnyHTTPException)
    async def refuse(_: Request, error: AnyHTTPException) -> Response:
        return JSONResponse(error_content(error), error.status_code, error.headers)

    async def caller(request: Request) -> str:
        """The owner of the request's token, within the rate limit."""
        name = tokens.owner(request.headers.get("authorization", ""))
        if name is None:
            raise HTTPException(401, "A valid bearer token is required.", {"WWW-Authenticate": "Bearer"})
        if seconds := limit.wait(name):
            after = {"Retry-After": str(math.ceil(seconds))}
            raise HTTPException(429, f"Too many requests: at most {limit.capacity:.0f} a minute.", after)
        return name

    Caller = Annotated[str, Depends(caller)]

    @app.api_route("/health", methods=["GET", "HEAD"])  # some probes ask with HEAD
    async def health() -> Response:
        is_well = fleet.engines[CHAMPION].is_alive
        return JSONResponse({"status": "ok" if is_well else "starting"}, 200 if is_well else 503)

    @app.get("/v1/models")
    async def models(_: Caller) -> dict[str, Any]:
        targets = [engine.target for engine in fleet.engines.values()]
        names = dict.fromkeys([targets[0].model, *(target.name for target in targets)])
        entries = [{"id": name, "object": "model", "created": started, "owned_by": "dpo"} for name in names]
        return {"object": "list", "data": entries}

    @app.post("/v1/chat/completions")
    async def complete(request: Request, name: Caller) -> Response:
        chat = await read_body(request, ChatRequest)
        chunks = answer(fleet, client, watchdog, journal, chat, name, most_tokens)
        first = await unless_gone(request, anext(chunks))
        content = first if first is None or chat.stream else await unless_gone(request, whole_answer(first, chunks))
        if first is None or content is None:
            return Response(status_code=499)  # the client has gone
        headers = {"X-DPO-Answer-Id": first["id"]}
        if chat.stream:
            return StreamingResponse(as_events(first, chunks), media_type="text/event-stream", headers=headers)
        return JSONResponse(content, headers=headers)

    @app.post("/v1/feedback")
    async def give_feedback(request: Request, name: Caller) -> dict[str, str]:
        body = await read_body(request, FeedbackRequest)
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

    @app.get("/v1/stats")
    async def stats(_: Caller) -> dict[str, Any]:
        running = {engine.target.name: engine.running for engine in fleet.engines.values()}
        return {**await run_in_threadpool(index.stats), "running": running}

    return app


async def answer(
    fleet: Fleet,
    client: httpx.AsyncClient,
    watchdog: Watchdog,
    journal: FeedbackJournal,
    chat: ChatRequest,
    name: str,
    most_tokens: int,
) -> Chunks:
    """One answer in OpenAI's chunks. The last comes after the answer is in the journal, so that feedback finds it."""
    began, clock, text, last = time.time(), time.monotonic(), list[str](), None
    messages, usage = [message.plain() for message in chat.messages], None
    with fleet.lease(chat.model, chat.user) as (role, engine):
        target = engine.target
        identity = {"id": uuid.uuid4().hex, "model": target.name}
        sampling = chat.parameters(most_tokens, await prompt_tokens(engine, messages), engine.prompts.context)
        try:
            async with aclosing(ask(engine, client, messages, sampling)) as upstream:
                async for chunk in upstream:
                    usage = chunk.get("usage") or usage
                    choice = (chunk["choices"] or [{}])[0]
                    text.append(choice.get("delta", {}).get("content") or "")
                    if choice.get("finish_reason"):
                        last = chunk
                    elif choice:
                        yield chunk | identity
        finally:
            if last is None:  # the client has left, or the gateway gave up
                watchdog.client_left(engine)
    if last is None:
        raise unavailable(target, ENDED)
    measured = {"seconds": round(time.monotonic() - clock, 3), "tokens": (usage or {}).get("completion_tokens")}
    record = Answer(
        id=identity["id"],
        time=began,
        messages=messages,
        text="".join(text).replace("\0", "\ufffd"),  # a null character cannot be stored
        model=target.model,
        version=target.version,
        run=target.run,
        role=role,
        user=chat.user or name,
        parameters={**sampling, **measured},
    )
    await run_in_threadpool(keep, journal, record)
    yield last | identity | {"usage": usage}


def keep(journal: FeedbackJournal, record: Answer) -> None:
    """A full disk costs the record of an answer, never the answer."""
    try:
        journal.append(record)
    except (OSError, ValueError) as error:
        print(f"serve: answer {record.id} was not recorded: {error}", flush=True)


async def as_events(first: dict[str, Any], chunks: Chunks) -> AsyncIterator[str]:
    try:
        yield event(first)
        async for chunk in chunks:
            yield event(chunk)
        yield "data: [DONE]\n\n"
    except HTTPException as error:
        yield event(error_content(error))
    finally:  # also when the client disconnects
        await chunks.aclose()


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def unless_gone(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """What the work gives; it is cancelled, and this is None, as soon as the client disconnects."""
    result, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        for task in (result, gone):
            task.cancel()
        await asyncio.gather(result, gone, return_exceptions=True)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def whole_answer(first: dict[str, Any], chunks: Chunks) -> dict[str, Any]:
    """One chat completion of all chunks."""
    text, last = [first["choices"][0]["delta"].get("content") or ""], first
    async for last in chunks:
        text.append(last["choices"][0]["delta"].get("content") or "")
    finish = last["choices"][0].get("finish_reason")
    message = {"role": "assistant", "content": "".join(text)}
    identity: dict[str, Any] = {key: last[key] for key in ("id", "model", "created", "usage") if key in last}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {**identity, "object": "chat.completion", "choices": [choice]}


def error_content(error: AnyHTTPException) -> dict[str, Any]:
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    code = getattr(error, "code", error.status_code)
    return {"error": {"message": error.detail, "type": kind, "code": code}}
