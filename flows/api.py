"""Prefect's server as we run it: SQLite writes wait for their turn, and only requests to our own host names are
answered. Run as a module, it is Prefect's command line with both.

Prefect begins a transaction that reads and then writes as a reader. When another one wrote in between, SQLite refuses
it at once ("database is locked"), however long it was told to wait: after four such refusals of an event, its
automation never runs, and nobody is told that a run failed. A transaction that begins as a writer waits instead.

A web page whose name resolves to 127.0.0.1 (DNS rebinding) reaches this server through a visitor's browser, under the
page's own host name. DPO_ALLOWED_HOSTS names the hosts that are ours, separated by commas; loopback by default.
"""

import os
from typing import Any

from fastapi import FastAPI
from prefect.cli import app
from prefect.server.api import server
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

LOOPBACK_NAMES = "127.0.0.1,localhost,[::1]"

_begin = AioSqliteConfiguration.begin_transaction


def _begin_as_writer(self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False) -> Any:
    return _begin(self, session, with_for_update=True)


AioSqliteConfiguration.begin_transaction = _begin_as_writer  # type: ignore[method-assign]


_create = server.create_app


def create_app() -> ASGIApp:
    return _guarded(_create())


def _guarded(made: FastAPI) -> ASGIApp:
    hosts = [name.strip() for name in (os.environ.get("DPO_ALLOWED_HOSTS") or LOOPBACK_NAMES).split(",")]
    return TrustedHostMiddleware(made, allowed_hosts=hosts, www_redirect=False)


def _create_to_serve(*given: Any, **named: Any) -> ASGIApp:
    """`server start` asks for the final one; Prefect's services call the same app in memory, under a made-up host."""
    made = _create(*given, **named)
    return _guarded(made) if named.get("final") else made


server.create_app = _create_to_serve  # type: ignore[assignment]


if __name__ == "__main__":
    app()
