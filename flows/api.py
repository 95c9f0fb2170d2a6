"""Prefect's server on SQLite, with writes that wait for their turn; run as a module, Prefect's command line with it.

Prefect begins a transaction that reads and then writes as a reader. When another one wrote in between, SQLite refuses
it at once ("database is locked"), however long it was told to wait: after four such refusals of an event, its
automation never runs, and nobody is told that a run failed. A transaction that begins as a writer waits instead.
"""

from typing import Any

from fastapi import FastAPI
from prefect.cli import app
from prefect.server.api import server
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession

_begin = AioSqliteConfiguration.begin_transaction


def _begin_as_writer(self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False) -> Any:
    return _begin(self, session, with_for_update=True)


AioSqliteConfiguration.begin_transaction = _begin_as_writer  # type: ignore[method-assign]


def create_app() -> FastAPI:
    return server.create_app()


if __name__ == "__main__":
    app()
