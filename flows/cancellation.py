"""Cancellation that a run notices by itself.

Prefect's worker delivers a cancellation. A cancellation while the worker or the server is down gets lost, and `dpo run`
has no worker: such a run would train to the end and promote its model. So a run reads its own state every few seconds,
and once more before it registers its model.
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

from tasks.system import processes

POLL_SECONDS = 5.0
MESSAGE = "Cancelled in Prefect; the run has stopped."

Parameters = ParamSpec("Parameters")

_noticed = threading.Event()


class RunCancelled(BaseException):
    """Not an Exception, so that nothing handles it as a failure or retries."""


def ends_cancelled(flow: Callable[Parameters, Any]) -> Callable[Parameters, Any]:
    """Decorate a flow's function: watch the run's state meanwhile, and end as Cancelled."""

    @wraps(flow)
    def watched(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
        over = threading.Event()
        # In a copy of our context, which alone knows the embedded server.
        context, run = copy_context(), str(runtime.flow_run.id)
        threading.Thread(target=context.run, args=(_watch, run, over), daemon=True).start()
        try:
            return flow(*args, **kwargs)
        except RunCancelled as error:
            return Cancelled(message=str(error))
        finally:
            over.set()

    return watched


def _watch(run: str, over: threading.Event) -> None:
    _noticed.clear()
    while not over.wait(POLL_SECONDS):
        if _is_cancelled(run):
            _noticed.set()
            processes.terminate_awaited()
            return


def stop_if_noticed() -> None:
    if _noticed.is_set():
        get_run_logger().warning("This run is cancelled and stops now")
        raise RunCancelled(MESSAGE)


def stop_if_cancelled() -> None:
    """Ask the server now, before a step that cannot be undone."""
    if _is_cancelled(str(runtime.flow_run.id)):
        _noticed.set()
    stop_if_noticed()


def _is_cancelled(run: str) -> bool:
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(run)).state
    except Exception:  # a server that does not answer must not stop a training run
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)
