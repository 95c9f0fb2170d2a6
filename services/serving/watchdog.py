"""Ends an engine that goes on with an answer whose client has left, so that it serves the others again.

A closed connection ends a generation at its next token. An engine that still reads a long prompt does not notice, and
transformers' server answers one request at a time. The fleet starts an engine that ended again.
"""

import asyncio
from collections.abc import Awaitable, Callable

from fastapi.concurrency import run_in_threadpool

from services.serving.engine import Engine

Ask = Callable[[Engine], Awaitable[None]]


class Watchdog:
    """`ask` gets one token from an engine, or an error. `patience`: seconds without a word for anybody."""

    def __init__(self, ask: Ask, patience: float) -> None:
        self.ask, self.patience = ask, patience
        self.left, self.tasks = set[Engine](), dict[Engine, asyncio.Task[None]]()

    def client_left(self, engine: Engine) -> None:
        self.left.add(engine)
        if engine not in self.tasks:
            self.tasks[engine] = asyncio.create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        try:
            while engine in self.left and engine.is_alive:
                self.left.discard(engine)  # a client that leaves from now on may be behind this question
                if not await self._answers(engine):
                    print(
                        f"serve: {engine.target.name} answered nobody for {self.patience:.0f} s after a client had "
                        "left, and starts again (`--patience` sets the time)",
                        flush=True,
                    )
                    await run_in_threadpool(engine.stop)
        finally:
            self.left.discard(engine)
            del self.tasks[engine]

    async def _answers(self, engine: Engine) -> bool:
        """Whether the engine answers a question of ours, which waits behind all others, or goes on answering those."""
        question = asyncio.ensure_future(self.ask(engine))
        try:
            while engine.is_alive:
                words = engine.words
                await asyncio.wait({question}, timeout=self.patience)
                if question.done() or engine.words == words:
                    return question.done()
            return True
        finally:
            question.cancel()
            await asyncio.gather(question, return_exceptions=True)
