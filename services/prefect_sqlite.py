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
from prefect.cli import app
from starlette.types import ASGIApp

from services import prefect_internals, prefect_schedules
from services.prefect_gate import guarded
from tasks.system import http_limits


def create_app() -> ASGIApp:
    """Of the embedded server."""
    return guarded(_create())


def _guarding(create: prefect_internals.Create) -> prefect_internals.Create:
    # Prefect finds the running app by a hash of all settings, which takes a third of a second for each action.
    in_memory = cache(create)

    def create_to_serve(*args: Any, **kwargs: Any) -> ASGIApp:
        """`server start` passes `final`; Prefect's own services call the app in memory, under a made-up host name."""
        api: Any = create(*args, **kwargs) if args or kwargs else in_memory()
        return guarded(api) if kwargs.get("final") else api

    return create_to_serve


_create = prefect_internals.replace_create_app(_guarding)
prefect_internals.begin_as_writer()
prefect_internals.replace_schedule_stores(prefect_schedules.checking)


if __name__ == "__main__":
    uvicorn.config.HTTP_PROTOCOLS["auto"] = http_limits.NAME  # Prefect passes no such option
    app()
