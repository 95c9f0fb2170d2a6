"""After the stages: the task that decides about the registry, and the pause in which a person may.

Not a stage of DVC, since who is champion now is no input that DVC could watch: it runs every time, and does nothing new
when nothing is new.
"""

import json
import sys
import threading
import time
from contextlib import suppress
from typing import Any
from uuid import UUID

from prefect import get_run_logger, pause_flow_run, resume_flow_run, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.input import RunInput

from flows import child
from flows.stage import USER_ERROR, StageFailed, Watch, worth_another_try
from flows.workspace import Workspace
from tasks.errors import UserError

NAME = "promote"
PROMOTED = "dpo.promoted"
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
    start = time.monotonic()
    run("tasks.promote", place)
    found = decision(place)
    if found.get("promoted") and not found.get("already"):
        _tell(found, "it passed the gate")
    return {"stage": NAME, "state": "ran", "seconds": round(time.monotonic() - start, 1)}


def run(module: str, place: Workspace, *arguments: str) -> None:
    """A command of tasks/, watched as a stage is."""
    watch = Watch(NAME)
    code = child.run([sys.executable, "-m", module, *arguments], place.root, place.environment(), watch)
    if watch.held and code == USER_ERROR:
        raise UserError("\n".join(watch.held).removeprefix("error: "))
    if code:
        raise StageFailed(f"{NAME} failed with exit code {code}. It last said: {''.join(watch.lines[-1:])}")
    watch.progress(1, 1)


def _tell(found: dict[str, Any], why: str) -> None:
    """An event on Prefect's server, on which flows/automations.py calls a webhook."""
    model, version, alias = found["model"], found["version"], found["alias"]
    resource = {"prefect.resource.id": f"dpo.model.{model}", "prefect.resource.name": model}
    message = f"{model} version {version} is now {alias}: {why}."
    payload = {"model": model, "version": version, "alias": alias, "message": message}
    emit_event(PROMOTED, resource, payload=payload)


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
        _tell(found, f"approved by {who}")
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
