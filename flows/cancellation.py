"""A run that notices by itself that it is cancelled.

Prefect's worker delivers a cancellation. One that is asked for while the worker or the server is away gets lost, and a
run by hand has no worker: such a run would train to the end and become champion. So a run reads its own state every few
seconds while it works, and once more before its model goes to the registry.
"""

import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import wraps
from typing import Any, ParamSpec
from uuid import UUID

from prefect import get_client, get_run_logger, runtime
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled

from flows import child

SECONDS = 5.0  # between two readings
MESSAGE = "Cancelled in Prefect; the run noticed by itself and stopped."

Given = ParamSpec("Given")

_noticed = threading.Event()


class RunCancelled(BaseException):
    """Not an Exception: nothing on the way may take it for a failure, or try again."""


def ends_cancelled(flow: Callable[Given, Any]) -> Callable[Given, Any]:
    """Of a flow's function: it reads its run's state meanwhile, and ends as Cancelled."""

    @wraps(flow)
    def watched(*given: Given.args, **named: Given.kwargs) -> Any:
        over = threading.Event()
        # In a copy of our context: the server of a run by hand is known there and nowhere else.
        context, run = copy_context(), str(runtime.flow_run.id)
        threading.Thread(target=context.run, args=(_watch, run, over), daemon=True).start()
        try:
            return flow(*given, **named)
        except RunCancelled as error:
            return Cancelled(message=str(error))
        finally:
            over.set()

    return watched


def _watch(run: str, over: threading.Event) -> None:
    _noticed.clear()
    while not over.wait(SECONDS):
        if _is_cancelled(run):
            _noticed.set()
            child.end_running()
            return


def stop_if_noticed() -> None:
    if _noticed.is_set():
        get_run_logger().warning("This run is cancelled and stops here")
        raise RunCancelled(MESSAGE)


def stop_if_cancelled() -> None:
    """Ask the server now: what follows cannot be taken back."""
    if _is_cancelled(str(runtime.flow_run.id)):
        _noticed.set()
    stop_if_noticed()


def _is_cancelled(run: str) -> bool:
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(run)).state
    except Exception:  # a server that does not answer is no reason to stop a training run
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)
