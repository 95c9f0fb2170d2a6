"""`dpo status`: the services, the schedules and the last runs; `dpo runs`: a table of all runs."""

from datetime import datetime
from typing import Any

from services import background, prefect_api
from services.background import Service
from services.mlflow_urls import mlflow_link, needs_server
from services.stack import PORTS, TITLES
from tasks.reports.summary import RunSummary
from tasks.runs import records
from tasks.runs.dvc_lock import artifacts_size, read_lock
from tasks.runs.records import RunRecord
from tasks.system.disk import human
from tasks.system.files import read_json_or_empty

LAST_RUNS = 5


def status() -> None:
    services = {name: background.running(name) for name in TITLES}
    for name, service in services.items():
        print(f"{TITLES[name]:<20} {_state(service)}", flush=True)
    server = services["prefect"]
    if server and server.is_healthy():
        _print_prefect(server)
    if not all(services.values()):
        print("\n`dpo up` starts what is missing.")


def _state(service: Service | None) -> str:
    if service is None:
        return "not running"
    state = "running" if service.is_healthy() else f"not responding (see {service.log}), running"
    address = f"  {service.address}" if service.name in PORTS else ""
    return f"{state} since {service.since:%Y-%m-%d %H:%M:%S}, process {service.pid}{address}"


def _print_prefect(server: Service) -> None:
    access = prefect_api.access_variables(server)
    deployments = {entry["id"]: entry for entry in prefect_api.post(access, "deployments/filter", {})}
    print("\nSchedules")
    for deployment in deployments.values():
        for schedule in deployment["schedules"]:
            rule = schedule["schedule"]
            state = f"on, {_next_run(access, deployment['id'])}" if schedule["active"] else "off"
            print(f"  {deployment['name']}: {rule.get('cron', rule)} ({rule.get('timezone') or 'UTC'}), {state}")
    print("\nLast runs")
    begun = {"flow_runs": {"state": {"name": {"not_any_": ["Scheduled"]}}}}
    query = {**begun, "sort": "EXPECTED_START_TIME_DESC", "limit": LAST_RUNS}
    runs = prefect_api.post(access, "flow_runs/filter", query)
    for run in runs:
        print(f"  {_line(run, deployments)}  {server.address}/runs/flow-run/{run['id']}")
    if not runs:
        print("  none yet")


def _next_run(access: dict[str, str], deployment: str) -> str:
    planned = {"deployment_id": {"any_": [deployment]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    query = {"flow_runs": planned, "sort": "EXPECTED_START_TIME_ASC", "limit": 1}
    runs = prefect_api.post(access, "flow_runs/filter", query)
    if not runs:
        return "no run planned yet (Prefect plans within a minute; if it does not, see `dpo logs prefect`)"
    return f"next {datetime.fromisoformat(runs[0]['expected_start_time']).astimezone():%Y-%m-%d %H:%M %Z}"


def _line(run: dict[str, Any], deployments: dict[str, Any]) -> str:
    began = datetime.fromisoformat(run["start_time"]).astimezone() if run["start_time"] else None
    origin = deployments.get(run["deployment_id"], {"name": "by hand"})["name"]
    time = f"{began:%m-%d %H:%M}" if began else "not started"
    return f"{time}  {run['state_name']:<10} {origin:<8} {run['name']:<36} {run['estimated_run_time']:6.0f} s"


def show_runs() -> None:
    for path in records.damaged_records():
        print(f"warning: {path} is empty or damaged; its run is not listed. `dpo doctor --fix` moves it aside.")
    runs = records.all_records()
    if not runs:
        print("No runs yet. Start one with `make demo`, `dpo run`, or `prefect deployment run dpo/full`.")
        return
    head = ("run", "state", "since", "model", "stages", "artifacts", "MLflow")
    print(records.text_table(map(_run_row, runs), head))
    if any(needs_server(read_json_or_empty(run.folder / "run.json")) for run in runs):
        print("\nThe pages of MLflow open after `dpo up`.")
    if unfinished := [run.name for run in runs if run.current_state not in (records.RUNNING, records.FINISHED)]:
        print(f"\n`dpo resume {unfinished[0]}` continues a run that did not finish; `dpo gc` deletes old ones.")


def _run_row(record: RunRecord) -> tuple[str, ...]:
    run = RunSummary.of(record)
    ran = [state["stage"] for state in run.states if state["state"] == "ran" and state["stage"] != "promote"]
    cached = sum(state["state"] != "ran" for state in run.states)
    stages = f"{', '.join(ran) or 'none'} ran, {cached} cached" if run.states else ""
    since = datetime.fromisoformat(record.since).strftime("%Y-%m-%d %H:%M") if record.since else ""
    lock = read_lock(run.root)
    size = human(artifacts_size(lock)) if lock else ""
    model = read_json_or_empty(record.folder / "params.json").get("promote", {}).get("model_name", "")
    return run.name, record.current_state, since, model, stages, size, mlflow_link(run.ids) or ""
