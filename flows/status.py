"""`make status`: what runs, since when and where; the schedules; the last runs."""

import base64
import json
import urllib.request
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from flows import services
from flows.services import Service
from flows.stack import PORTS, TITLES
from tasks.output import as_command

RUNS = 5


@as_command
def status() -> None:
    found = {name: services.running(name) for name in TITLES}
    for name, service in found.items():
        print(f"{TITLES[name]:<20} {_state(service)}", flush=True)
    server = found["prefect"]
    if server and server.answers():
        _of_prefect(server)
    if not all(found.values()):
        print("\n`make up` starts what is missing.")


def _state(service: Service | None) -> str:
    if service is None:
        return "does not run"
    how = "runs" if service.answers() else f"does not answer (see {service.log})"
    where = f"  {service.address}" if service.name in PORTS else ""
    return f"{how} since {service.since:%Y-%m-%d %H:%M:%S}, process {service.pid}{where}"


def _of_prefect(server: Service) -> None:
    deployments = {one["id"]: one for one in ask(server, "deployments/filter", {})}
    print("\nSchedules")
    for one in deployments.values():
        for schedule in one["schedules"]:
            when = schedule["schedule"].get("cron", schedule["schedule"]), schedule["schedule"].get("timezone") or "UTC"
            state = f"on, {_next(server, one['id'])}" if schedule["active"] else "off"
            print(f"  {one['name']}: {when[0]} ({when[1]}), {state}")
    print("\nLast runs")
    begun = {"flow_runs": {"state": {"name": {"not_any_": ["Scheduled"]}}}}
    runs = ask(server, "flow_runs/filter", {**begun, "sort": "EXPECTED_START_TIME_DESC", "limit": RUNS})
    for run in runs:
        print(f"  {_line(run, deployments)}  {server.address}/runs/flow-run/{run['id']}")
    if not runs:
        print("  none yet")


def _next(server: Service, deployment: str) -> str:
    planned = {"deployment_id": {"any_": [deployment]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    runs = ask(server, "flow_runs/filter", {"flow_runs": planned, "sort": "EXPECTED_START_TIME_ASC", "limit": 1})
    if not runs:
        return "and no run is planned (it takes a minute; otherwise see `make logs SERVICE=prefect`)"
    return f"next {datetime.fromisoformat(runs[0]['expected_start_time']).astimezone():%Y-%m-%d %H:%M %Z}"


def ask(server: Service, path: str, body: dict[str, Any]) -> Any:
    return ask_api(services.prefect_access(server), path, body)


def ask_api(access: Mapping[str, str], path: str, body: dict[str, Any], timeout: float = 30.0) -> Any:
    """Of Prefect's API, without Prefect's client, whose import takes seconds."""
    headers = {"Content-Type": "application/json"}
    if secret := access.get("PREFECT_API_AUTH_STRING"):
        headers["Authorization"] = f"Basic {base64.b64encode(secret.encode()).decode()}"
    request = urllib.request.Request(f"{access['PREFECT_API_URL']}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def _line(run: dict[str, Any], deployments: dict[str, Any]) -> str:
    began = datetime.fromisoformat(run["start_time"]).astimezone() if run["start_time"] else None
    by = deployments.get(run["deployment_id"], {"name": "by hand"})["name"]
    when = f"{began:%m-%d %H:%M}" if began else "not begun  "
    return f"{when}  {run['state_name']:<10} {by:<8} {run['name']:<36} {run['estimated_run_time']:6.0f} s"


if __name__ == "__main__":
    status()
