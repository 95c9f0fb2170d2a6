"""Prefect's server with four changes: SQLite writes wait for their turn, a gate checks requests (prefect_gate.py), half
requests are closed (tasks/system/http_limits.py), and schedules hold only parameters that their deployment takes
(prefect_schedules.py).

Run as a module, it is Prefect's command line with them.

Prefect begins transactions as a reader, also those that write later. If another transaction wrote in between, SQLite
rejects the write at once ("database is locked"), whatever its timeout. After four such failures for one event Prefect
drops its automation, and nobody learns that a run failed. A transaction that begins as a writer waits instead.
"""

from functools import cache
from typing import Any

import uvicorn.config
from fastapi import FastAPI
from prefect.cli import app
from prefect.server.api import server
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.types import ASGIApp

from services import prefect_schedules  # noqa: F401 (checks what Prefect stores)
from services.prefect_gate import guarded
from tasks.system import http_limits

_begin = AioSqliteConfiguration.begin_transaction


def _begin_as_writer(self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False) -> Any:
    return _begin(self, session, with_for_update=True)


AioSqliteConfiguration.begin_transaction = _begin_as_writer  # type: ignore[method-assign]


_create = server.create_app


def create_app() -> ASGIApp:
    return guarded(_create())


@cache
def _in_memory() -> FastAPI:
    """The running app. Prefect finds it by a hash of all settings, which takes a third of a second for each action."""
    return _create()


def _create_to_serve(*args: Any, **kwargs: Any) -> ASGIApp:
    """`server start` passes `final`; Prefect's own services call the app in memory, under a made-up host name."""
    if not args and not kwargs:
        return _in_memory()
    api = _create(*args, **kwargs)
    return guarded(api) if kwargs.get("final") else api


server.create_app = _create_to_serve  # type: ignore[assignment]


if __name__ == "__main__":
    uvicorn.config.HTTP_PROTOCOLS["auto"] = http_limits.NAME  # Prefect passes no such option
    app()
