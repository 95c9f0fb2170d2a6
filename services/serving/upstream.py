"""Requests to an engine, and how many tokens they have."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
from fastapi import HTTPException
from fastapi.concurrency import run_in_threadpool

from services.serving.engine import Engine
from services.serving.fleet import unavailable
from tasks.feedback.events import Messages

UPSTREAM = httpx.Timeout(600, connect=10)  # seconds without a token: an engine may let requests wait in line
ENDED = "ended during the answer"
Sampling = dict[str, Any]  # the parameters of a request
Chunks = AsyncGenerator[dict[str, Any], None]


async def ask(engine: Engine, client: httpx.AsyncClient, messages: Messages, sampling: Sampling) -> Chunks:
    """The engine's own chunks. Closing this generator closes the connection, and the engine stops generating."""
    address, body = f"{engine.address}/v1/chat/completions", engine.body(messages, sampling)
    try:
        async with client.stream("POST", address, json=body) as response:
            if response.status_code >= 400:
                reason = (await response.aread()).decode(errors="replace")[:500]
                status = 400 if response.status_code < 500 else 502
                raise HTTPException(status, f"The engine of {engine.target.name} refused the request: {reason}")
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise HTTPException(502, f"The engine of {engine.target.name} failed: {chunk['error']}")
                    engine.words += is_word(chunk)
                    yield chunk
    except (httpx.TransportError, ValueError) as error:
        raise unavailable(engine.target, ENDED) from error


async def one_word(engine: Engine, client: httpx.AsyncClient) -> None:
    question, sampling = [{"role": "user", "content": "Hi"}], {"max_tokens": 1, "temperature": 0.0, "top_p": 1.0}
    async with aclosing(ask(engine, client, question, sampling)) as chunks:
        async for chunk in chunks:
            if is_word(chunk):
                return


def is_word(chunk: dict[str, Any]) -> bool:
    """Whether the model wrote it: transformers' server sends a first chunk before the model begins."""
    choice = (chunk["choices"] or [{}])[0]
    return bool(choice.get("delta", {}).get("content") or choice.get("finish_reason"))


async def prompt_tokens(engine: Engine, messages: Messages) -> int:
    try:
        return await run_in_threadpool(engine.prompts.count, messages)
    except ValueError as error:
        raise HTTPException(400, f"{engine.target.name}: {error}.") from None
