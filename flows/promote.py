"""After the stages: the task that registers and promotes the model, and the pause for manual approval.

It is not a stage of DVC, because DVC cannot watch which version is champion now. It runs every time, and changes
nothing if nothing is new.
"""

import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

from httpx import HTTPError
from prefect import get_client, get_run_logger, pause_flow_run, resume_flow_run, runtime
from prefect.client.orchestration import SyncPrefectClient
from prefect.events import Event
from prefect.input import RunInput

from flows import cancellation
from flows.stage import USER_ERROR, StageFailed, StageOutput, retried
from services.automations import PROMOTED, REFUSED
from services.mlflow_urls import mlflow_link
from tasks.config.params import load_params
from tasks.config.paths import METRICS
from tasks.promote import outbox
from tasks.runs import records
from tasks.runs.workspace import Workspace
from tasks.secrets.redact import redact
from tasks.system import processes
from tasks.system.files import read_json, read_json_or_empty
from tasks.system.lock import file_lock

NAME = "promote"
NOBODY = "nobody, in time"  # the name in the answer that our own timeout sends
PREFECT_TIMEOUT_MARGIN = 600  # seconds: our timeout comes first


class Approval(RunInput):
    """The form that Prefect's page shows."""

    approve: bool = False
    your_name: str = ""


@retried(task_run_name=NAME)
def promote(workspace: Workspace) -> dict[str, Any]:
    cancellation.stop_if_cancelled()
    start = time.monotonic()
    run("tasks", workspace, "promote")
    send_promotions()
    send_refusal(workspace)
    return {"stage": NAME, "state": "ran", "seconds": round(time.monotonic() - start, 1)}


def run(module: str, workspace: Workspace, *arguments: str) -> None:
    """Run a module as a command and stream its output as a stage's."""
    output = StageOutput(NAME, workspace.root)
    code = processes.run([sys.executable, "-m", module, *arguments], workspace.root, workspace.environment(), output)
    cancellation.stop_if_noticed()
    if output.error_lines and code == USER_ERROR:
        raise output.user_error()
    if code:
        raise StageFailed(f"{NAME} failed with exit code {code}. Its last line: {''.join(output.lines[-1:])}")
    output.progress(1, 1)


def send_promotions() -> None:
    """Send an event to Prefect's server for every promotion that has none yet; services/automations.py calls a webhook.

    The server drops an event whose id it has seen, so that a repetition after a crash notifies nobody twice.
    """
    with file_lock(outbox.folder().with_suffix(".lock")), get_client(sync_client=True) as client:
        for promotion in outbox.pending():
            if promotion.copied:
                _send(client, PROMOTED, promotion.id, _payload(promotion))
                promotion.path.unlink()


def _payload(promotion: outbox.Promotion) -> dict[str, str]:
    model, version, alias = promotion.model, promotion.version, promotion.alias
    reason = ", ".join(filter(None, [promotion.why, promotion.details]))
    message = f"{model} version {version} is now {alias}: {reason}.{_run_link(promotion.run)}"
    return {"model": model, "version": version, "alias": alias, "message": message}


def _send(client: SyncPrefectClient, name: str, key: str, payload: dict[str, str]) -> None:
    model = payload["model"]
    resource = {"prefect.resource.id": f"dpo.model.{model}", "prefect.resource.name": model}
    content = {"id": key, "occurred": datetime.now().astimezone(), "event": name, "payload": payload}
    event = Event.model_validate({**content, "resource": resource, "related": _this_run()})
    client.request("POST", "/events", json=[event.model_dump(mode="json")]).raise_for_status()


def send_refusal(workspace: Workspace) -> None:
    """The same for a model that the gate refused; one event for each flow run, however often it is retried."""
    result = decision(workspace)
    if not result or result["promoted"] or result["waiting"]:
        return
    model, version = result["model"], result["version"]
    reasons = redact("; ".join(result["reasons"]))
    message = f"{model} version {version} is not promoted: {reasons}.{_run_link(workspace.run_name)}"
    key = str(uuid5(UUID(str(runtime.flow_run.id)), REFUSED))
    try:
        with get_client(sync_client=True) as client:
            _send(client, REFUSED, key, {"model": model, "version": version, "message": message})
    except HTTPError as error:  # the decision stands and is on the run's page
        get_run_logger().warning("promote: could not send the notification of the refusal: %s", redact(str(error)))


def _run_link(name: str) -> str:
    link = mlflow_link(read_json_or_empty(records.runs_folder() / name / "run.json")) if name else None
    return (f" Run {name}." if name else "") + (f" {link}" if link else "")


def _this_run() -> list[dict[str, str]]:
    """The related resource that Prefect adds to its own events, so that notifications link to the run."""
    if not (run := runtime.flow_run.id):
        return []
    return [{"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.role": "flow-run"}]


def ask_for_approval(workspace: Workspace) -> None:
    """If a version waits for approval, pause until a person presses Resume in Prefect, and approve it if they do."""
    log, result = get_run_logger(), decision(workspace)
    hours = load_params(workspace.root / "params.yaml").promote.approval_hours
    if not (hours and result.get("waiting")):
        return
    version, alias = result["version"], result["alias"]
    log.info("promote: waits up to %g hours for approval. Press Resume on this run's page in Prefect", hours)
    question = f"May version {version} of {result['model']} become {alias}? See the artifact dpo-result."
    answer = _pause(Approval.with_initial_data(description=question), hours * 3600)
    if answer.approve:
        name = answer.your_name or "somebody in Prefect"
        run("cli", workspace, "approve", "--", version, name)  # a name may begin with a dash
        send_promotions()
    elif answer.your_name == NOBODY:
        name = f"{result['model']}/{version}"
        log.info("promote: nobody answered in time; `dpo approve %s NAME` still approves the version", name)
    else:
        log.info("promote: %s refused; version %s is not promoted", answer.your_name or "somebody", version)


def _pause(form: type[Approval], seconds: float) -> Approval:
    """A person's answer, or NOBODY's after the timeout. Prefect fails a run whose pause expires, so we resume first."""
    timer = threading.Timer(seconds, _resume, [runtime.flow_run.id])
    timer.start()
    try:
        return pause_flow_run(wait_for_input=form, timeout=int(seconds) + PREFECT_TIMEOUT_MARGIN, poll_interval=2)
    finally:
        timer.cancel()


def _resume(run: str) -> None:
    with suppress(Exception):  # a person resumed it a moment before
        resume_flow_run(UUID(run), run_input={"approve": False, "your_name": NOBODY})


def decision(workspace: Workspace) -> dict[str, Any]:
    path = workspace.root / METRICS / "promote.json"
    return read_json(path) if path.exists() else {}
