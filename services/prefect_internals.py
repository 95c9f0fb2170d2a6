"""What we replace or read in Prefect without a public interface for it, and why.

tests/services/test_prefect_internals.py fails if an upgrade moves or changes any of it.

- `create_app`: `prefect server start` takes no application from outside, and Prefect has no place for a middleware such
  as the gate (prefect_gate.py).
- `begin_transaction`: no setting makes SQLite's transactions begin as writers (prefect_sqlite.py).
- `create_deployment_schedules`, `update_deployment_schedule`: no setting checks a schedule's parameters
  (prefect_schedules.py).
- EMBEDDED: Prefect's own temporary server has these variables, too, but Ctrl-C ends it before the run that it serves.
- FLOW_RUN: a flow that another flow calls does not learn from `prefect.runtime` that a worker started the process.
- `ensure_logging_setup`: Prefect sets logging up with the first flow, and drops handlers that were added before.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

# The modules of Prefect's server take seconds to import: flows, which import this one, never need them.

Create = Callable[..., Any]
Store = Callable[..., Awaitable[Any]]
EMBEDDED = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
FLOW_RUN = "PREFECT__FLOW_RUN_ID"
OWN_VARIABLES = "PREFECT__"  # how the names begin that identify a process's own flow run


def replace_create_app(make: Callable[[Create], Create]) -> Create:
    """Let `make` wrap the function that makes the server's application; the original."""
    from prefect.server.api import server

    original = server.create_app
    server.create_app = make(original)
    return original


def begin_as_writer() -> None:
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    def begin_as_writer(self: AioSqliteConfiguration, session: Any, with_for_update: bool = False) -> Any:
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_as_writer  # type: ignore[method-assign]


def replace_schedule_stores(checking: Callable[[Store, Store], Store]) -> None:
    """Let `checking` wrap both functions that store schedules. It also gets the one that reads a deployment."""
    from prefect.server.models import deployments

    read: Any = deployments.read_deployment
    deployments.create_deployment_schedules = checking(deployments.create_deployment_schedules, read)
    deployments.update_deployment_schedule = checking(deployments.update_deployment_schedule, read)


def on_a_worker() -> bool:
    """Whether a worker started this process, for this flow or for one that calls it."""
    return FLOW_RUN in os.environ


def set_up_logging() -> None:
    from prefect.logging.configuration import ensure_logging_setup

    ensure_logging_setup()
