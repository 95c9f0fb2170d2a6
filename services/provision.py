"""Create or update what our flows need on a Prefect server: work pool, deployments (infra/prefect.yaml), automations.

    python -m services.provision

does so on the server of PREFECT_API_URL, for workers that `dpo up` does not start (infra/worker.sh). Running it again
changes nothing. `prefect deploy` would reset every schedule to its state in the file, which is off, so schedules that
a person switched are switched back afterwards.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from services import automations, background, stack
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.system.commands import as_command
from tasks.system.files import fingerprint, sha256

FILE = "infra/prefect.yaml"
DEPLOYED = background.FOLDER / "deployed"  # the content hash of the last deployment

# How a worker starts a run. Prefect's default template lets the creator of a run choose command, folder and
# environment, which amounts to a shell. Ours has no variables. `env` is absent because Prefect would merge a run's
# own values into it.
TEMPLATE: dict[str, Any] = {
    "job_configuration": {"command": None, "working_dir": ".", "stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}


@contextmanager
def connect(access: Mapping[str, str]) -> Iterator[SyncPrefectClient]:
    """A client of the server that `access` names, also for code that reads Prefect's settings."""
    login = access.get("PREFECT_API_AUTH_STRING")
    settings = temporary_settings({PREFECT_API_URL: access["PREFECT_API_URL"], PREFECT_API_AUTH_STRING: login})
    with settings, get_client(sync_client=True) as client:
        yield client


def provision(client: SyncPrefectClient, access: Mapping[str, str], settings: stack.Settings) -> None:
    """Deployments and automations. The pool comes first and separately, because a worker needs it to start."""
    changed = deploy(client, access, settings.timezone)
    print(f"Deployments {'deployed' if changed else 'unchanged'}: {', '.join(deployment_names())}", flush=True)
    changes = automations.watch_runs(settings.heartbeat_timeout) + automations.notify(settings.webhook)
    print(f"Automations {'changed: ' + ', '.join(changes) if changes else 'unchanged'}", flush=True)
    if not automations.has_notifications():
        print("No notifications: DPO_WEBHOOK_URL is not set (docs/operations.md)", flush=True)


def create_pool(client: SyncPrefectClient) -> None:
    """Create the work pool, or correct its template."""
    try:
        if client.read_work_pool(stack.POOL).base_job_template != TEMPLATE:
            client.update_work_pool(stack.POOL, WorkPoolUpdate(base_job_template=TEMPLATE))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=stack.POOL, type="process", base_job_template=TEMPLATE))


def deploy(client: SyncPrefectClient, access: Mapping[str, str], timezone: str) -> bool:
    """Deploy infra/prefect.yaml if it or the flows changed. Returns whether that was necessary."""
    content = _content_hash(timezone)
    before = {name: _read_deployment(client, name) for name in deployment_names()}
    if DEPLOYED.exists() and DEPLOYED.read_text() == content and all(before.values()):
        return False
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", FILE]
    env = {**os.environ, **access, stack.TIMEZONE: timezone, "COLUMNS": "200"}  # the file reads the time zone
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise UserError(f"Prefect could not deploy {FILE}:\n{output}\nFix the cause, then run the same command again.")
    for name in before:
        _refuse_unknown_parameters(client, client.read_deployment_by_name(name))
    for deployment in filter(None, before.values()):
        _restore_schedules(client, deployment)
    background.make_folder()
    DEPLOYED.write_text(content)
    return True


def _refuse_unknown_parameters(client: SyncPrefectClient, deployment: DeploymentResponse) -> None:
    """The schema that Prefect makes of a flow lets parameters pass that the flow does not have."""
    schema = {**(deployment.parameter_openapi_schema or {}), "additionalProperties": False}
    client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=schema))


def deployment_names() -> list[str]:
    """Names such as `dpo/full`. A flow is named after its function."""
    entries = yaml.safe_load((ROOT / FILE).read_text())["deployments"]
    return [f"{entry['entrypoint'].rpartition('.')[2]}/{entry['name']}" for entry in entries]


def _content_hash(timezone: str) -> str:
    """A hash of everything that determines the deployments' settings and parameter schemas."""
    files = [ROOT / FILE, ROOT / "params.yaml", *ROOT.glob("flows/*.py"), *ROOT.glob("tasks/**/*.py")]
    files += ROOT.glob("flows/recipes/*.yaml")
    return fingerprint([timezone, {path.relative_to(ROOT).as_posix(): sha256(path) for path in files}])


def _read_deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _restore_schedules(client: SyncPrefectClient, before: DeploymentResponse) -> None:
    active = {schedule.slug: schedule.active for schedule in before.schedules}
    for schedule in client.read_deployment(before.id).schedules:
        if active.get(schedule.slug, schedule.active) != schedule.active:
            client.update_deployment_schedule(before.id, schedule.id, active=active[schedule.slug])


@as_command
def main() -> None:
    if not os.environ.get("PREFECT_API_URL"):
        raise UserError("PREFECT_API_URL is not set. Set it to the server's API, such as http://prefect:4200/api.")
    with get_client(sync_client=True) as client:
        create_pool(client)
        provision(client, {}, stack.read_settings(os.environ))


if __name__ == "__main__":
    main()
