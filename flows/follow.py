"""Start a run of a deployment, or find one, and show its stages' lines until it ends (`dpo follow`).

The exit code is 0 if the run completed. Ctrl-C ends the display, not the run.
"""

import re
import signal
import sys
import time
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, Log, StateType
from prefect.client.schemas.sorting import FlowRunSort, LogSort
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from flows import embedded_server
from flows.terminal import LOGGERS, Terminal
from tasks.errors import UserError
from tasks.secrets.redact import redact

POLL_SECONDS = 1.0
LATE = timedelta(seconds=30)  # lines of one moment may reach the server this far apart
LAST_LINES_SECONDS = 10.0  # how long after the end a run's process may send its last lines
PAGE = 200  # lines that the server returns at once
ENDED = "Finished in state"
ENGINE = re.compile(  # lines of Prefect's engine, which writes to the loggers of our own lines
    rf"^({ENDED}|Beginning (flow|subflow) run|Created (task|subflow) run|View at |Encountered exception during|"
    r"Engine execution|Task run failed|Retries are exhausted|Running \d+ deployment|Executing deployment|"
    r"Deployment step|All deployment)"
)
NORMAL_STATES = ("Scheduled", "Pending", "Submitting", "Running")


def start(client: SyncPrefectClient, deployment: str, parameters: dict[str, Any]) -> FlowRun:
    try:
        target = client.read_deployment_by_name(deployment)
    except ObjectNotFound:
        raise UserError(f"{client.api_url} has no deployment '{deployment}'. See `prefect deployment ls`.") from None
    if overrides := parameters.get("overrides"):  # added to the deployment's own, which make dpo/smoke short
        parameters = {**parameters, "overrides": {**(target.parameters.get("overrides") or {}), **overrides}}
    try:
        return client.create_flow_run_from_deployment(target.id, parameters=parameters)
    except PrefectHTTPStatusError as error:
        raise UserError(f"Prefect rejects the run: {error.response.json().get('detail', error)}") from None


def find(client: SyncPrefectClient, name: str) -> FlowRun:
    """By its name (the newest of several) or by its id."""
    try:
        return client.read_flow_run(UUID(name))
    except ValueError:
        named = filters.FlowRunFilter(name=filters.FlowRunFilterName(any_=[name]))
        runs = client.read_flow_runs(flow_run_filter=named, sort=FlowRunSort.START_TIME_DESC, limit=1)
    except ObjectNotFound:
        runs = []
    if not runs:
        raise UserError(f"There is no run '{name}' on {client.api_url}. `dpo status` shows the last runs.")
    return runs[0]


def follow(client: SyncPrefectClient, run: FlowRun) -> FlowRun:
    """Show the run's lines as they come, and return the run as it ended."""
    lines, terminal, last_state, until = RunLog(run.id), Terminal(), "", None
    try:
        while True:
            try:
                run = client.read_flow_run(run.id)
                new = lines.new(client)
            except httpx.TransportError:
                terminal.show("Prefect does not answer; trying again")
                time.sleep(5 * POLL_SECONDS)
                continue
            for log in new:
                if log.name in LOGGERS and not ENGINE.match(log.message):
                    terminal.show(redact(log.message))
            state = run.state.name or "" if run.state else ""
            if run.state and run.state.is_final():
                until = until or time.monotonic() + LAST_LINES_SECONDS
                never_started = run.start_time is None  # so nothing sends lines
                if lines.ended or never_started or time.monotonic() > until:
                    return run
            elif state not in (last_state, *NORMAL_STATES):
                terminal.show(
                    f"{run.name}: {state}" + (". Does a worker run? See `dpo status`" if state == "Late" else "")
                )
            last_state = state
            time.sleep(POLL_SECONDS)
    finally:
        terminal.end_line()


class RunLog:
    """Reads the log lines of a run from the server, each once."""

    def __init__(self, run: UUID) -> None:
        self.run = filters.LogFilterFlowRunId(any_=[run])
        self.seen: dict[UUID, Log] = {}
        self.ended = False  # whether the flow's last line has arrived

    def new(self, client: SyncPrefectClient) -> list[Log]:
        last = max((log.timestamp for log in self.seen.values()), default=None)
        since = filters.LogFilterTimestamp(after_=last - LATE) if last else None
        query, logs = filters.LogFilter(flow_run_id=self.run, timestamp=since), list[Log]()
        while page := client.read_logs(query, limit=PAGE, offset=len(logs), sort=LogSort.TIMESTAMP_ASC):
            logs += page
        new = [log for log in logs if log.id not in self.seen]
        self.seen = {log.id: log for log in logs if log.id}
        self.ended = self.ended or any(log.name == LOGGERS[0] and log.message.startswith(ENDED) for log in new)
        return new


def outcome(run: FlowRun) -> int:
    """Print how the run ended; the exit code."""
    state = run.state
    assert state is not None
    message = redact(state.message or "").removeprefix("Flow run encountered an exception: ")
    seconds = run.total_run_time.total_seconds()
    print(f"{run.name}: {state.name} after {seconds:.0f} s" + (f". {message}" if message else ""))
    return 0 if state.type == StateType.COMPLETED else 1


def detach(run: FlowRun) -> None:
    print(f"\nThe run {run.name} continues. `dpo follow --run {run.name}` shows it again.", flush=True)
    print(f"`prefect flow-run cancel {run.id}` cancels it.", flush=True)
    sys.exit(128 + signal.SIGINT)


def follow_or_start(deployment: str, name: str | None, parameters: dict[str, Any]) -> int:
    """Follow the run of that name, or a new run of the deployment, until it ends; its exit code."""
    if not PREFECT_API_URL.value():
        raise UserError("No Prefect server is configured. Start one with `dpo up`, or set PREFECT_API_URL.")
    try:
        with get_client(sync_client=True) as client:
            run = find(client, name) if name else start(client, deployment, parameters)
            print(f"{run.name}: {embedded_server.flow_page(str(run.id))}", flush=True)
            try:
                run = follow(client, run)
            except KeyboardInterrupt:
                detach(run)
    except httpx.TransportError as error:
        raise UserError(
            f"Prefect's server at {PREFECT_API_URL.value()} does not answer ({error}). `dpo up` starts one."
        ) from None
    return outcome(run)
