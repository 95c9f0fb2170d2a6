"""`make status`: what runs, since when and where; the schedules; the last runs."""

import os
from typing import Any

from flows import services
from flows.services import Service
from flows.stack import PORTS, TITLES

RUNS = 5


def status() -> None:
    found = {name: services.running(name) for name in TITLES}
    for name, service in found.items():
        print(f"{TITLES[name]:<17} {_state(service)}", flush=True)
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
    os.environ.update(services.prefect_access(server))
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        deployments = client.read_deployments()
        names = {one.id: one.name for one in deployments}
        runs = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=RUNS + 50)
    print("\nSchedules")
    for one in deployments:
        for schedule in one.schedules:
            when = getattr(schedule.schedule, "cron", "?"), getattr(schedule.schedule, "timezone", "UTC")
            print(f"  {one.name}: {when[0]} ({when[1]}), {'on' if schedule.active else 'off'}")
    print("\nLast runs")
    shown = [run for run in runs if run.state_name != "Scheduled"][:RUNS]
    for run in shown:
        print(f"  {_line(run, names)}  {server.address}/runs/flow-run/{run.id}")
    if not shown:
        print("  none yet")


def _line(run: Any, names: dict[Any, str]) -> str:
    began = f"{run.start_time.astimezone():%m-%d %H:%M}" if run.start_time else "not begun  "
    seconds = run.total_run_time.total_seconds()
    return f"{began}  {run.state_name:<10} {names.get(run.deployment_id, 'by hand'):<8} {run.name:<28} {seconds:6.0f} s"


if __name__ == "__main__":
    status()
