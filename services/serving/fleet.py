"""The engines behind the gateway: they follow the registry's aliases, and a share of the requests tries a challenger.

Each role has a thread. When its version changes, the thread starts an engine for the new one, waits until it answers,
sends new requests there and stops the old engine after its last request. A failed start keeps the old engine. An
engine that ended is started again, also while the registry is down.
"""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import HTTPException

from services.serving.engine import Engine, Target, find_target, weights
from tasks.errors import UserError
from tasks.secrets.redact import redact

CHAMPION, CHALLENGER = "champion", "challenger"
POLL = 2.0  # seconds between two looks at the registry
RETRY = 60.0  # seconds before a version that did not start is tried again
MOST_RUNNING = 256  # requests of one engine at the same time
GPU_MEMORY = 0.9  # of a GPU, divided among the engines that may run at once


def unavailable(target: Target, reason: str) -> HTTPException:
    return HTTPException(503, f"The engine of {target.name} {reason}. Try again.", {"Retry-After": "10"})


class Fleet:
    def __init__(self, champion: str, challenger: str | None = None, share: float = 0.1, seed: int | None = None):
        self.names = {CHAMPION: champion, **({CHALLENGER: challenger} if challenger else {})}
        self.share, self.random = share, random.Random(seed)
        self.engines: dict[str, Engine] = {}  # by role; both roles may share one
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.failed: dict[Target, float] = {}  # when it did not start
        self.reported: dict[str, str] = {}  # last message by role, so that it is printed once
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the first engines; an error here is the user's to correct."""
        for role in self.names:
            self._serve(role, find_target(self.names[role]))
        for role in self.names:
            self._thread(self._watch, role)

    def close(self) -> None:
        self.closing.set()
        for thread in self.threads:
            thread.join()
        for engine in set(self.engines.values()):
            engine.stop()

    @contextmanager
    def lease(self, model: str | None, user: str | None) -> Iterator[tuple[str, Engine]]:
        """The role and engine of a request. The engine is not stopped before the block ends."""
        with self.lock:
            role = self._route(model, user)
            engine = self.engines[role]
            if not engine.is_alive or engine.running >= MOST_RUNNING:
                reason = "has too many requests" if engine.is_alive else "is being started again"
                raise unavailable(engine.target, reason)
            engine.running += 1
        try:
            yield role, engine
        finally:
            with self.lock:
                engine.running -= 1

    def _route(self, model: str | None, user: str | None) -> str:
        """By its exact name, or by share: a user always meets the same role, a request without user a random one."""
        roles = {engine.target.name: role for role, engine in reversed(self.engines.items())}
        if model in roles and "/" in str(model):
            return roles[str(model)]
        if model not in (None, "", CHAMPION, *(engine.target.model for engine in self.engines.values())):
            names = ", ".join(sorted({self.engines[CHAMPION].target.model, *roles}))
            raise HTTPException(404, f"Model '{model}' is not served here. Ask for one of: {names}.")
        if CHALLENGER not in self.engines or not self.engines[CHALLENGER].is_alive:
            return CHAMPION
        digest = hashlib.sha256((user or "").encode()).digest()
        number = int.from_bytes(digest[:8]) / 2**64 if user else self.random.random()
        return CHALLENGER if number < self.share else CHAMPION

    def _watch(self, role: str) -> None:
        while not self.closing.wait(POLL):
            try:
                self._follow(role)
                self.reported.pop(role, None)
            except Exception as error:
                message = redact(str(error) or type(error).__name__)
                if self.reported.get(role) != message:
                    name = self.engines[role].target.name
                    print(f"serve: {role}: {message}\nserve: {name} keeps its place as {role}", flush=True)
                self.reported[role] = message

    def _follow(self, role: str) -> None:
        engine, problem = self.engines[role], None
        try:
            wanted = find_target(self.names[role])
        except UserError as error:  # the registry is down: keep the current version alive
            wanted, problem = engine.target, error
        since = time.monotonic() - RETRY
        may_start = (target for target in (wanted, engine.target) if self.failed.get(target, since) <= since)
        if (target := next(may_start, None)) and (target != engine.target or not engine.is_alive):
            self._serve(role, target)
        if problem:
            raise problem

    def _serve(self, role: str, target: Target) -> None:
        """Give the role to an engine of `target`, and stop its former engine after that one's last request."""
        before = self.engines.get(role)
        shared = any(engine.target == target and engine.is_alive for engine in self.engines.values())
        started = None if shared else self._start(target, before)
        with self.lock:
            self.engines[role] = started or next(e for e in self.engines.values() if e.target == target and e.is_alive)
            unused = before if before not in self.engines.values() else None
        print(f"serve: {target.name} is the {role}", flush=True)
        if unused:
            self._thread(self._drain, unused)

    def _start(self, target: Target, before: Engine | None) -> Engine:
        print(f"serve: starting an engine for {target.name}", flush=True)
        engine = None
        try:
            share = GPU_MEMORY / (len(self.names) + 1)  # one more runs while an engine is replaced
            engine = Engine(target, weights(target, before), share)
            engine.wait(self.closing)
        except BaseException:
            self.failed[target] = time.monotonic()
            if engine:
                engine.stop()
            raise
        self.failed.pop(target, None)
        return engine

    def _drain(self, engine: Engine) -> None:
        while engine.running and engine.is_alive and not self.closing.wait(0.2):
            pass
        engine.stop()
        print(f"serve: stopped the engine of {engine.target.name}", flush=True)

    def _thread(self, work: Callable[..., None], argument: object) -> None:
        thread = threading.Thread(target=work, args=(argument,), daemon=True)
        self.threads.append(thread)
        thread.start()
