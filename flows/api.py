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

LOOPBACK_NAMES = "127.0.0.1,localhost,[::1]"

_begin = AioSqliteConfiguration.begin_transaction


def _begin_as_writer(self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False) -> Any:
    return _begin(self, session, with_for_update=True)


AioSqliteConfiguration.begin_transaction = _begin_as_writer  # type: ignore[method-assign]


_create = server.create_app


def create_app(*given: Any, **named: Any) -> FastAPI:
    made = _create(*given, **named)
    if not any(one.cls is TrustedHostMiddleware for one in made.user_middleware):  # Prefect returns one from its cache
        hosts = [name.strip() for name in (os.environ.get("DPO_ALLOWED_HOSTS") or LOOPBACK_NAMES).split(",")]
        made.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    return made


server.create_app = create_app  # `server start` imports it from there


if __name__ == "__main__":
    app()
