"""`make down`: end what `make up` started, the worker first, so that the server can still note how its runs ended."""

import time
import urllib.error
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psutil

from flows import passwords, services
from flows.services import Service
from flows.stack import TITLES
from flows.status import ask

PATIENCE = 30.0  # seconds for Prefect to send its notifications
FINAL = {"FAILED", "CRASHED"}
MESSAGE = "`make down` ended the worker that ran it. `make runs` names the run, `make resume` goes on with it."


def down() -> None:
    with services.one_at_a_time():
        server, began = services.running("prefect"), datetime.now(UTC)
        pids = _below(services.running("worker"))
        _end("worker")
        if server and server.answers():
            with suppress(urllib.error.URLError, OSError):  # a server that fails is ended all the same
                _note_how_runs_ended(server, pids, began)
        for name in ("metrics", "mlflow", "prefect"):
            _end(name)
        passwords.remove_client()


def _end(name: str) -> None:
    ended = services.end(name)
    print(f"{TITLES[name]} {'is ended' if ended else 'did not run'}", flush=True)


def _below(worker: Service | None) -> set[str]:
    process = worker.process if worker else None
    with suppress(psutil.NoSuchProcess):
        return {str(one.pid) for one in process.children(recursive=True)} if process else set()
    return set()


def _note_how_runs_ended(server: Service, pids: set[str], began: datetime) -> None:
    """A run that ended with its worker said nothing: the page would show it as running, and nobody would be told."""
    active = _runs(server, {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}})
    for run in active:
        if str(run["infrastructure_pid"]) in pids:
            kind = "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED"
            state = {"type": kind, "name": kind.capitalize(), "message": MESSAGE}
            ask(server, f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
            print(f"  {run['name']} is noted as {kind.capitalize()}", flush=True)
    ended = {"state": {"type": {"any_": sorted(FINAL)}}, "end_time": {"after_": began.isoformat()}}
    told = [run for run in _runs(server, ended) if run["deployment_id"]]
    if told and _notifies(server):
        _wait_for_notifications(server, len(told), began)


def _runs(server: Service, which: dict[str, Any]) -> list[dict[str, Any]]:
    return list(ask(server, "flow_runs/filter", {"flow_runs": which}))


def _notifies(server: Service) -> bool:
    found = ask(server, "automations/filter", {})
    return any(one["name"] == "dpo: notify of failure" and one["enabled"] for one in found)


def _wait_for_notifications(server: Service, count: int, since: datetime) -> None:
    done = {"name": ["prefect.automation.action.executed", "prefect.automation.action.failed"]}
    asked = {"filter": {"event": done, "occurred": {"since": since.isoformat()}}}
    until = time.monotonic() + PATIENCE
    while (found := int(ask(server, "events/filter", asked)["total"])) < count:
        if time.monotonic() > until:
            print(f"  Prefect sent {found} of {count} notifications within {PATIENCE:.0f} s; it is ended", flush=True)
            return
        time.sleep(0.5)


if __name__ == "__main__":
    down()
