"""The work pool and the deployments of infra/prefect.yaml on a server: made where they are missing or out of date.

Deploying again would put every schedule back to how it is shipped, switched off, so what a person switched stays.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound

from flows import ROOT, services
from flows.stack import TIMEZONE
from tasks.errors import UserError

FILE = "infra/prefect.yaml"
NOTE = services.FOLDER / "deployed"
Schedules = dict[tuple[str, str], bool]  # by deployment and slug: is it on?

# How a worker starts a run. Prefect's own template lets whoever creates a run choose the command, the folder and the
# environment, which is a shell. Ours has no variables. `env` is left out: Prefect lays a run's over one that is here.
TEMPLATE: dict[str, Any] = {
    "job_configuration": {"command": None, "working_dir": ".", "stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}


def make_pool(client: SyncPrefectClient, name: str) -> None:
    """The work pool with our template, also where it had another one."""
    try:
        if client.read_work_pool(name).base_job_template != TEMPLATE:
            client.update_work_pool(name, WorkPoolUpdate(base_job_template=TEMPLATE))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=TEMPLATE))


def deploy(client: SyncPrefectClient, access: Mapping[str, str], timezone: str) -> bool:
    """Whether there was anything to do. `access` is what leads to the server beyond our own environment."""
    wanted = fingerprint(timezone)
    if NOTE.exists() and NOTE.read_text() == wanted and all(_found(client, name) for name in names()):
        return False
    before = dict(_schedules(client))
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", FILE]
    env = {**os.environ, **access, TIMEZONE: timezone, "COLUMNS": "200"}  # infra/prefect.yaml reads the time zone
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise UserError(f"{FILE} could not be deployed:\n{said}\nMend it, and then this again.")
    _switch(client, before)
    services.make_folder()
    NOTE.write_text(wanted)
    return True


def names() -> list[str]:
    """As `dpo/full`: the flow is named like its function."""
    found = yaml.safe_load((ROOT / FILE).read_text())["deployments"]
    return [f"{one['entrypoint'].rpartition('.')[2]}/{one['name']}" for one in found]


def fingerprint(timezone: str) -> str:
    """Of all that a deployment's schema and settings are made from."""
    files = [ROOT / FILE, ROOT / "params.yaml", *ROOT.glob("flows/*.py"), *ROOT.glob("tasks/**/*.py")]
    files += ROOT.glob("flows/recipes/*.yaml")
    digests = [(path.relative_to(ROOT).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return hashlib.sha256(repr([timezone, *sorted(digests)]).encode()).hexdigest()


def _found(client: SyncPrefectClient, name: str) -> bool:
    try:
        client.read_deployment_by_name(name)
    except ObjectNotFound:
        return False
    return True


def _schedules(client: SyncPrefectClient) -> Iterator[tuple[tuple[str, str], bool]]:
    for name in names():
        try:
            deployment = client.read_deployment_by_name(name)
        except ObjectNotFound:
            continue
        for schedule in deployment.schedules:
            yield (name, str(schedule.slug)), schedule.active


def _switch(client: SyncPrefectClient, before: Schedules) -> None:
    for name in {name for name, _ in before}:
        deployment = client.read_deployment_by_name(name)
        for schedule in deployment.schedules:
            on = before.get((name, str(schedule.slug)), schedule.active)
            if on != schedule.active:
                client.update_deployment_schedule(deployment.id, schedule.id, active=on)
