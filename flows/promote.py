"""After the stages: the task that decides about the registry, and the pause in which a person may.

Not a stage of DVC, since who is champion now is no input that DVC could watch: it runs every time, and does nothing new
when nothing is new.
"""

import json
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

from httpx import HTTPError
from prefect import get_client, get_run_logger, pause_flow_run, resume_flow_run, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.events import Event
from prefect.input import RunInput

from flows import cancellation, child, runs
from flows.links import mlflow_link
from flows.stage import USER_ERROR, StageFailed, Watch, worth_another_try
from flows.workspace import Workspace
from tasks.errors import UserError
from tasks.files import recall
from tasks.machines.flock import locked
from tasks.redact import redact
from tasks.release import outbox

NAME = "promote"
PROMOTED = "dpo.promoted"
REFUSED = "dpo.refused"
NOBODY = "nobody, in time"
SPARE = 600  # seconds between our giving up and Prefect's


class Approval(RunInput):
    """What Prefect's page asks a person."""

    approve: bool = False
    your_name: str = ""


@task(
    task_run_name=NAME,
    retries=2,
    retry_delay_seconds=[2, 5],
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
)
def promote(place: Workspace) -> dict[str, Any]:
    cancellation.stop_if_cancelled()
    start = time.monotonic()
    run("tasks.promote", place)
    tell()
    tell_of_refusal(place)
    return {"stage": NAME, "state": "ran", "seconds": round(time.monotonic() - start, 1)}


def run(module: str, place: Workspace, *arguments: str) -> None:
    """A command of tasks/, watched as a stage is."""
    watch = Watch(NAME, place.root)
    code = child.run([sys.executable, "-m", module, *arguments], place.root, place.environment(), watch)
    cancellation.stop_if_noticed()
    if watch.held and code == USER_ERROR:
        raise UserError("\n".join(watch.held).removeprefix("error: "))
    if code:
        raise StageFailed(f"{NAME} failed with exit code {code}. It last said: {''.join(watch.lines[-1:])}")
    watch.progress(1, 1)


def tell() -> None:
    """An event on Prefect's server for every promotion that it was not told of, on which flows/automations.py calls a
    webhook. The server drops an event whose id it has seen, so that a repetition after a crash tells nobody twice."""
    with locked(outbox.folder().with_suffix(".lock")), get_client(sync_client=True) as client:
        for promotion in outbox.pending():
            if promotion.copied:
                _send(client, PROMOTED, promotion.id, _payload(promotion))
                promotion.path.unlink()


def _payload(promotion: outbox.Promotion) -> dict[str, str]:
    model, version, alias = promotion.model, promotion.version, promotion.alias
    said = ", ".join(filter(None, [promotion.why, promotion.details]))
    message = f"{model} version {version} is now {alias}: {said}.{_of_run(promotion.run)}"
    return {"model": model, "version": version, "alias": alias, "message": message}


def _send(client: SyncPrefectClient, name: str, key: str, payload: dict[str, str]) -> None:
    model = payload["model"]
    resource = {"prefect.resource.id": f"dpo.model.{model}", "prefect.resource.name": model}
    content = {"id": key, "occurred": datetime.now().astimezone(), "event": name, "payload": payload}
    event = Event.model_validate({**content, "resource": resource, "related": _this_run()})
    client.request("POST", "/events", json=[event.model_dump(mode="json")]).raise_for_status()


def tell_of_refusal(place: Workspace) -> None:
    """The same for a model that the gate refused; one event for each flow run, however often it is tried."""
    found = decision(place)
    if not found or found["promoted"] or found["waiting"]:
        return
    model, version = found["model"], found["version"]
    why = redact("; ".join(found["reasons"]))
    message = f"{model} version {version} is not promoted: {why}.{_of_run(place.key)}"
    key = str(uuid5(UUID(str(runtime.flow_run.id)), REFUSED))
    try:
        with get_client(sync_client=True) as client:
            _send(client, REFUSED, key, {"model": model, "version": version, "message": message})
    except HTTPError as error:  # the decision stands and is on the run's page: no reason to fail
        get_run_logger().warning("promote: nobody is notified that the model is refused: %s", redact(str(error)))


def _of_run(name: str) -> str:
    link = mlflow_link(recall(runs.runs_folder() / name / "run.json")) if name else None
    return (f" Run {name}." if name else "") + (f" {link}" if link else "")


def _this_run() -> list[dict[str, str]]:
    """As Prefect adds it to events of its own making: notifications link to the run."""
    if not (run := runtime.flow_run.id):
        return []
    return [{"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.role": "flow-run"}]


def waits_for_a_person(place: Workspace) -> bool:
    from tasks.params import load_params

    return bool(decision(place).get("waiting") and load_params(place.root / "params.yaml").promote.approval_hours)


def ask_a_person(place: Workspace) -> None:
    """Pause until somebody presses Resume in Prefect; what they say about the version counts, whoever works here."""
    from tasks.params import load_params

    log, found = get_run_logger(), decision(place)
    hours = load_params(place.root / "params.yaml").promote.approval_hours
    assert hours is not None
    log.info("promote: waits up to %g hours for a person: Resume, on this run's page in Prefect, asks", hours)
    question = (
        f"May version {found['version']} of {found['model']} become {found['alias']}? See the artifact dpo-result."
    )
    answer = _paused(Approval.with_initial_data(description=question), hours * 3600)
    if answer.approve:
        who = answer.your_name or "somebody in Prefect"
        run("tasks.release.approve", place, found["version"], who)
        tell()
    elif answer.your_name == NOBODY:
        log.info("promote: nobody said anything in time; `make approve VERSION=%s BY=name` still can", found["version"])
    else:
        log.info("promote: %s said no; version %s is not promoted", answer.your_name or "somebody", found["version"])


def _paused(wanted: type[Approval], seconds: float) -> Approval:
    """What a person said, or NOBODY did. Prefect fails a run whose pause expires, so we resume it ourselves before."""
    timer = threading.Timer(seconds, _resume, [runtime.flow_run.id])
    timer.start()
    try:
        return pause_flow_run(wait_for_input=wanted, timeout=int(seconds) + SPARE, poll_interval=2)
    finally:
        timer.cancel()


def _resume(run: str) -> None:
    with suppress(Exception):  # somebody resumed it a moment before
        resume_flow_run(UUID(run), run_input={"approve": False, "your_name": NOBODY})


def decision(place: Workspace) -> dict[str, Any]:
    path = place.root / "data" / "metrics" / "promote.json"
    return json.loads(path.read_text()) if path.exists() else {}
