"""One answer of an engine in OpenAI's chunks, kept in the journal, and the responses that are made of the chunks."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as AnyHTTPException

from services.serving.fleet import Fleet, unavailable
from services.serving.requests import ChatRequest
from services.serving.upstream import ENDED, Chunks, ask, prompt_tokens
from services.serving.watchdog import Watchdog
from tasks.feedback.events import Answer
from tasks.feedback.journal import FeedbackJournal


@dataclass(frozen=True)
class Completions:
    fleet: Fleet
    client: httpx.AsyncClient
    watchdog: Watchdog
    journal: FeedbackJournal
    most_tokens: int  # of an answer

    async def answer(self, chat: ChatRequest, name: str) -> Chunks:
        """One answer. The last chunk comes after the answer is in the journal, so that feedback finds it."""
        began, clock, text, last = time.time(), time.monotonic(), list[str](), None
        messages, usage = [message.plain() for message in chat.messages], None
        with self.fleet.lease(chat.model, chat.user) as (role, engine):
            target = engine.target
            identity = {"id": uuid.uuid4().hex, "model": target.name}
            sampling = chat.parameters(self.most_tokens, await prompt_tokens(engine, messages), engine.prompts.context)
            try:
                async with aclosing(ask(engine, self.client, messages, sampling)) as upstream:
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
                    self.watchdog.client_left(engine)
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
        await run_in_threadpool(keep, self.journal, record)
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
