"""Prefect's server with fixes: SQLite writes wait for their turn, other host names and half requests are rejected.

Run as a module, it is Prefect's command line with them.

Prefect begins transactions as a reader, also those that write later. If another transaction wrote in between, SQLite
rejects the write at once ("database is locked"), whatever its timeout. After four such failures for one event Prefect
drops its automation, and nobody learns that a run failed. A transaction that begins as a writer waits instead.

A web page whose host name resolves to 127.0.0.1 (DNS rebinding) can reach this server through a visitor's browser,
with the page's host name in its requests. DPO_ALLOWED_HOSTS lists the accepted names, separated by commas; loopback by
default.
"""

import os
from functools import cache
from typing import Any

import uvicorn.config
from fastapi import FastAPI
from prefect.cli import app
from prefect.server.api import server
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from tasks.system import http_limits

LOOPBACK_NAMES = "127.0.0.1,localhost,[::1]"

_begin = AioSqliteConfiguration.begin_transaction


def _begin_as_writer(self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False) -> Any:
    return _begin(self, session, with_for_update=True)


AioSqliteConfiguration.begin_transaction = _begin_as_writer  # type: ignore[method-assign]


_create = server.create_app


def create_app() -> ASGIApp:
    return _check_hosts(_create())


def _check_hosts(api: FastAPI) -> ASGIApp:
    hosts = [name.strip() for name in (os.environ.get("DPO_ALLOWED_HOSTS") or LOOPBACK_NAMES).split(",")]
    return TrustedHostMiddleware(api, allowed_hosts=hosts, www_redirect=False)


@cache
def _in_memory() -> FastAPI:
    """The running app. Prefect finds it by a hash of all settings, which takes a third of a second for each action."""
    return _create()


def _create_to_serve(*args: Any, **kwargs: Any) -> ASGIApp:
    """`server start` passes `final`; Prefect's own services call the app in memory, under a made-up host name."""
    if not args and not kwargs:
        return _in_memory()
    api = _create(*args, **kwargs)
    return _check_hosts(api) if kwargs.get("final") else api


server.create_app = _create_to_serve  # type: ignore[assignment]


if __name__ == "__main__":
    uvicorn.config.HTTP_PROTOCOLS["auto"] = http_limits.NAME  # Prefect passes no such option
    app()
