"""Limits in front of our HTTP servers, for uvicorn's option `http`: half a request holds no place for long.

uvicorn limits the time between two requests and the size of a head, but waits for ever for the rest of either. The
gateway, the arena and the metrics endpoint get this class by services/http_app.py, MLflow's server by UVICORN_HTTP, and
Prefect's by services/prefect_sqlite.py. uvicorn has no public hook: tests/services/test_http_limits.py fails if an
upgrade moves it.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

NAME = "tasks.system.http_limits:LimitedProtocol"
HEAD_SECONDS = 15.0  # for a request line with its headers
BODY_SECONDS, BODY_BYTES = 20.0, 10_000  # a body advances by so many bytes in each so many seconds
MOST_CONNECTIONS = 400  # of a process: 1024 open files is a usual limit, and a request of the gateway takes two
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 10\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class LimitedProtocol(H11Protocol):
    """A connection. If there are too many, a new one takes the place of the one that waits longest for a request."""

    idle_since = 0.0
    received = 0  # bytes since the last look
    timer: asyncio.TimerHandle | None = None
    timed: Any = None  # what the timer waits for, a state of h11

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        is_full = len(self.connections) >= MOST_CONNECTIONS and not self._make_room()
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        if is_full:
            transport.write(FULL)
            transport.close()
        else:
            self._time(h11.IDLE, HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.received += len(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = self.loop.time()
        if self.conn.their_state is h11.SEND_BODY:  # a second request came along with the first
            self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._time(None, 0)
        super().connection_lost(exc)

    def _follow(self) -> None:
        """Time what the client sends now: a head, a body, or nothing while it waits for the answer."""
        state = self.conn.their_state
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # a WebSocket has its own
            self._time(None, 0)
        elif state is not self.timed:
            seconds = {h11.IDLE: HEAD_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(state)
            self._time(state, seconds) if seconds else self._time(None, 0)

    def _time(self, state: Any, seconds: float) -> None:
        if self.timer:
            self.timer.cancel()
        self.timed, self.received = state, 0
        self.timer = self.loop.call_later(seconds, self._too_late) if state else None

    def _too_late(self) -> None:
        is_slow = self.received < BODY_BYTES and not self.flow.read_paused  # paused: it is the server that is slow
        if self.timed is h11.SEND_BODY and not is_slow:
            self._time(h11.SEND_BODY, BODY_SECONDS)
        else:
            self._give_up()

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(LATE)
        self.transport.close()

    def _make_room(self) -> bool:
        """Close the connection that is longest without a request; whether there is one."""
        limited = [one for one in self.connections if isinstance(one, LimitedProtocol)]
        idle = [one for one in limited if one.conn.their_state is h11.IDLE and not one.transport.is_closing()]
        if idle:
            min(idle, key=lambda one: one.idle_since)._give_up()
        return bool(idle)
