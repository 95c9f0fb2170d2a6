"""`dpo down`: stop what `dpo up` started. The worker stops first, so that the server can record how its runs ended."""

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psutil

from services import background, passwords, prefect_api
from services.background import Service
from services.stack import TITLES

NOTIFICATION_TIMEOUT = 30.0  # seconds
MESSAGE = "`dpo down` stopped the worker that ran it. `dpo runs` lists the run, `dpo resume` continues it."


def down() -> None:
    with background.exclusive_lock():
        server, began = background.running("prefect"), datetime.now(UTC)
        pids = _descendant_pids(background.running("worker"))
        _stop("worker")
        if server and server.is_healthy():
            with suppress(OSError):  # a failing server is stopped all the same
                _record_ended_runs(prefect_api.access_variables(server), pids, began)
        for name in ("metrics", "mlflow", "prefect"):
            _stop(name)
        passwords.remove_client()


def _stop(name: str) -> None:
    stopped = background.stop(name)
    print(f"{TITLES[name]}: {'stopped' if stopped else 'was not running'}", flush=True)


def _descendant_pids(worker: Service | None) -> set[str]:
    process = worker.process if worker else None
    with suppress(psutil.NoSuchProcess):
        return {str(child.pid) for child in process.children(recursive=True)} if process else set()
    return set()


def _record_ended_runs(access: dict[str, str], pids: set[str], began: datetime) -> None:
    """Set the final state of runs that ended with the worker: Prefect would show them as running and not notify."""
    for run in _flow_runs(access, {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}):
        if str(run["infrastructure_pid"]) in pids:
            kind = "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED"
            state = {"type": kind, "name": kind.capitalize(), "message": MESSAGE}
            prefect_api.post(access, f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
            print(f"  run {run['name']}: recorded as {kind.capitalize()}", flush=True)
    failed = {"state": {"type": {"any_": ["CRASHED", "FAILED"]}}, "end_time": {"after_": began.isoformat()}}
    notified = [run for run in _flow_runs(access, failed) if run["deployment_id"]]
    if notified and _has_notifications(access):
        _wait_for_notifications(access, len(notified), began)


def _flow_runs(access: dict[str, str], condition: dict[str, Any]) -> list[dict[str, Any]]:
    return list(prefect_api.post(access, "flow_runs/filter", {"flow_runs": condition}))


def _has_notifications(access: dict[str, str]) -> bool:
    automations = prefect_api.post(access, "automations/filter", {})
    return any(entry["name"] == "dpo: notify of failure" and entry["enabled"] for entry in automations)


def _wait_for_notifications(access: dict[str, str], count: int, since: datetime) -> None:
    actions = {"name": ["prefect.automation.action.executed", "prefect.automation.action.failed"]}
    query = {"filter": {"event": actions, "occurred": {"since": since.isoformat()}}}
    deadline = time.monotonic() + NOTIFICATION_TIMEOUT
    while (sent := int(prefect_api.post(access, "events/filter", query)["total"])) < count:
        if time.monotonic() > deadline:
            print(f"  Prefect sent {sent} of {count} notifications within {NOTIFICATION_TIMEOUT:.0f} s", flush=True)
            return
        time.sleep(0.5)
