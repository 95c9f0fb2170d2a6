"""`python -m flows.follow dpo/full [--recipe NAME] [--set KEY=VALUE ...]` (or `make follow`): start a deployment's run
and show its stages' lines; `--run NAME` (`make follow RUN=name`) shows those of a run that was started before.

The exit code is 0 where the run completed. Ctrl-C ends the display, not the run.
"""

import argparse
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
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    LogFilter,
    LogFilterFlowRunId,
    LogFilterTimestamp,
)
from prefect.client.schemas.objects import FlowRun, Log, StateType
from prefect.client.schemas.sorting import FlowRunSort, LogSort
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from flows import server
from flows.dpo import override
from flows.terminal import Terminal
from tasks.errors import UserError
from tasks.output import as_command
from tasks.redact import redact

SECONDS = 1.0  # between two questions to the server
LATE = timedelta(seconds=30)  # lines of one moment may reach the server this far apart
LAST_WORDS = 10.0  # seconds after the end in which the run's process sends its last lines
PAGE = 200  # lines that the server returns at once
# Prefect's engine writes to the loggers of our own lines.
OURS = ("prefect.flow_runs", "prefect.task_runs")
ENDED = "Finished in state"
ENGINE = re.compile(
    rf"^({ENDED}|Beginning (flow|subflow) run|Created (task|subflow) run|View at |Encountered exception during|"
    r"Engine execution|Task run failed|Retries are exhausted|Running \d+ deployment|Executing deployment|"
    r"Deployment step|All deployment)"
)
QUIET = ("Scheduled", "Pending", "Submitting", "Running")


def start(client: SyncPrefectClient, deployment: str, parameters: dict[str, Any]) -> FlowRun:
    try:
        found = client.read_deployment_by_name(deployment)
    except ObjectNotFound:
        raise UserError(f"{client.api_url} has no deployment '{deployment}'. See `prefect deployment ls`.") from None
    if given := parameters.get("overrides"):  # a deployment has its own: dpo/smoke is short by them
        parameters = {**parameters, "overrides": {**(found.parameters.get("overrides") or {}), **given}}
    try:
        return client.create_flow_run_from_deployment(found.id, parameters=parameters)
    except PrefectHTTPStatusError as error:
        raise UserError(f"Prefect refuses the run: {error.response.json().get('detail', error)}") from None


def find(client: SyncPrefectClient, name: str) -> FlowRun:
    """By its name, of several the newest, or by its id."""
    try:
        return client.read_flow_run(UUID(name))
    except ValueError:
        named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        runs = client.read_flow_runs(flow_run_filter=named, sort=FlowRunSort.START_TIME_DESC, limit=1)
    except ObjectNotFound:
        runs = []
    if not runs:
        raise UserError(f"There is no run '{name}' on {client.api_url}. `make status` shows the last ones.")
    return runs[0]


def follow(client: SyncPrefectClient, run: FlowRun) -> FlowRun:
    """Show the run's lines as they come; the run as it ended."""
    lines, shown, said, until = Lines(run.id), Terminal(), "", None
    try:
        while True:
            try:
                run = client.read_flow_run(run.id)
                new = lines.new(client)
            except httpx.TransportError:
                shown.show("Prefect does not answer; asking again")
                time.sleep(5 * SECONDS)
                continue
            for log in new:
                if log.name in OURS and not ENGINE.match(log.message):
                    shown.show(redact(log.message))
            state = run.state.name or "" if run.state else ""
            if run.state and run.state.is_final():
                until = until or time.monotonic() + LAST_WORDS
                if lines.ended or time.monotonic() > until:
                    return run
            elif state not in (said, *QUIET):
                shown.show(f"{run.name}: {state}" + (". Is a worker there? `make status`" if state == "Late" else ""))
            said = state
            time.sleep(SECONDS)
    finally:
        shown.end_line()


class Lines:
    """The log lines of a run that the server has, each once."""

    def __init__(self, run: UUID) -> None:
        self.run = LogFilterFlowRunId(any_=[run])
        self.seen: dict[UUID, Log] = {}
        self.ended = False  # the flow's last line is here

    def new(self, client: SyncPrefectClient) -> list[Log]:
        last = max((log.timestamp for log in self.seen.values()), default=None)
        since = LogFilterTimestamp(after_=last - LATE) if last else None
        asked, found = LogFilter(flow_run_id=self.run, timestamp=since), list[Log]()
        while page := client.read_logs(asked, limit=PAGE, offset=len(found), sort=LogSort.TIMESTAMP_ASC):
            found += page
        new = [log for log in found if log.id not in self.seen]
        self.seen = {log.id: log for log in found if log.id}
        self.ended = self.ended or any(log.name == OURS[0] and log.message.startswith(ENDED) for log in new)
        return new


def outcome(run: FlowRun) -> int:
    """Say how the run ended; the exit code."""
    state = run.state
    assert state is not None
    good = state.type == StateType.COMPLETED
    why = redact(state.message or "").removeprefix("Flow run encountered an exception: ")
    seconds = run.total_run_time.total_seconds()
    print(f"{run.name}: {state.name} after {seconds:.0f} s" + (f". {why}" if why else ""))
    return 0 if good else 1


def detach(run: FlowRun) -> None:
    again = f"`make follow RUN={run.name}` (python -m flows.follow --run {run.name})"
    print(f"\nThe run {run.name} goes on. {again} shows it again.", flush=True)
    print(f"`prefect flow-run cancel {run.id}` cancels it.", flush=True)
    sys.exit(128 + signal.SIGINT)


@as_command
def main() -> None:
    about = "start a run of a deployment, or follow a run"
    parser = argparse.ArgumentParser(prog="python -m flows.follow", description=about)
    parser.add_argument("deployment", nargs="?", help="dpo/full, dpo/smoke, dpo/nightly, sweep/grid")
    parser.add_argument("--run", metavar="NAME", help="follow this run, by its name or Prefect's id, and start none")
    parser.add_argument("--recipe", help="a named overlay of params.yaml, from flows/recipes")
    parser.add_argument("--name", help="of the new run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="train.beta=0.2, as in YAML")
    parser.add_argument(
        "-p", "--parameter", action="append", default=[], metavar="KEY=VALUE", help="any other, as in YAML"
    )
    asked = parser.parse_args()
    if bool(asked.deployment) == bool(asked.run):
        raise UserError("Say what to follow: `make follow DEPLOYMENT=dpo/full` starts a run, RUN=name follows one.")
    if not PREFECT_API_URL.value():
        raise UserError("No Prefect server is known here. `make up` starts one, or PREFECT_API_URL names yours.")
    parameters = dict(override(text) for text in asked.parameter)
    parameters |= {name: getattr(asked, name) for name in ("recipe", "name") if getattr(asked, name)}
    if asked.set:
        parameters["overrides"] = dict(override(text) for text in asked.set)
    try:
        with get_client(sync_client=True) as client:
            run = find(client, asked.run) if asked.run else start(client, asked.deployment, parameters)
            print(f"{run.name}: {server.flow_page(str(run.id))}", flush=True)
            try:
                run = follow(client, run)
            except KeyboardInterrupt:
                detach(run)
    except httpx.TransportError as error:
        raise UserError(
            f"Prefect's server at {PREFECT_API_URL.value()} does not answer ({error}). `make up` starts one."
        ) from None
    if code := outcome(run):
        sys.exit(code)


if __name__ == "__main__":
    main()
