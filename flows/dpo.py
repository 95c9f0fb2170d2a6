"""The flow `dpo`: a task per stage of dvc.yaml, then proof that nothing is stale, then promote, then publish.

`python -m flows.dpo [--recipe NAME] [--set train.beta=0.2 ...] [--name NAME]` runs it here, on Prefect's embedded
server, `--resume NAME` goes on with one that did not finish; `prefect deployment run dpo/full` runs it on a worker
(infra/prefect.yaml).
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

import yaml
from prefect import flow, get_client, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import CancelledRun
from prefect.states import Completed

from flows import ROOT, cancellation, child, commits, promote, publish, retrain, runs, server, terminal, workspace
from flows.parameters import NO_NAME, NO_RECIPE, Name, Overrides, Recipe
from flows.runs import Record
from flows.stage import StageFailed, stage
from flows.workspace import Workspace
from tasks import disk
from tasks.errors import UserError


@flow
@cancellation.ends_cancelled
def dpo(
    recipe: Recipe = NO_RECIPE,
    name: Name = NO_NAME,
    resume: Name = NO_NAME,
    only_if_new: bool = False,
    registered: bool = True,
    overrides: Overrides = {},  # noqa: B006 (None would make a form that asks for a type)
) -> Any:
    """From preference data to a registered model.

    Args:
        recipe: a named overlay of params.yaml, from flows/recipes; none: params.yaml as it stands.
        name: of the run, its worktree and its branch runs/<name>; without one it is Prefect's name for the flow run.
        resume: the name of a run that did not finish, to go on with; nothing else is given then.
        only_if_new: end at once where nothing is new since the last finished run (flows/retrain.py), and stop where
            the data have drifted.
        registered: the model goes into the registry and through the gate; a sweep's runs do not.
        overrides: values of params.yaml by dotted name, {"train.beta": 0.2}.
    """
    if _by_a_worker():
        child.end_with_parent()
    resume = runs.known(resume).name if resume else None
    began, night = datetime.now().astimezone(), retrain.asked(recipe, overrides, resume)
    if only_if_new and (why := night.nothing_new()):
        get_run_logger().info("retrain: %s", why)
        return Completed(message=why, data={"nothing_new": why})
    with workspace.opened(_record(recipe, overrides, name, resume), runtime.flow_run.id) as place:
        _name_flow_run(place.key)
        _say_where(place)
        night.note(place)
        with publish.recorded(place, {} if resume else {"recipe": recipe or "none"}) as states:
            last = run_stages(place, states, {"prepare": lambda: night.check_drift(place)} if only_if_new else {})
            if registered:
                states.append(promote.promote(place, wait_for=last))
            publish.publish(place, states)
            left = night.outcome(place, began) if registered else None
    night.write(left)
    if registered and promote.waits_for_a_person(place) and not server.embedded():  # the workspace is free meanwhile
        promote.ask_a_person(place)
    return {"key": place.key, "workspace": str(_closed(place)), "stages": states}


def _record(recipe: str | None, overrides: dict[str, Any] | None, name: str | None, resume: str | None) -> Record:
    if resume:
        if recipe or overrides or name:
            raise UserError(f"The run {resume} goes on with what it was started with: give nothing but its name.")
        return runs.check_resumable(resume)
    files = workspace.plan(recipe, overrides)
    label = runs.label(runtime.flow_run.name, runtime.flow_run.id)
    own = bool(name or files) or _by_a_worker()
    return workspace.prepared(name, files, own=own, flow_run=runtime.flow_run.id, label=label)


def _by_a_worker() -> bool:
    """Whether a deployment started this, a flow around ours included: then the checkout is not ours to work in."""
    return runtime.deployment.id is not None or "PREFECT__FLOW_RUN_ID" in os.environ


def _say_where(place: Workspace) -> None:
    if not place.own:
        return
    log = get_run_logger()
    log.info("Run %s works in %s, a worktree of its own", place.key, place.root)
    if left_out := [name for name in commits.untracked() if not commits.ours(name)]:
        more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        log.info(
            "Not in the worktree, being untracked: %s%s. Data is read from the checkout; `git add` takes in the rest.",
            ", ".join(left_out[:5]),
            more,
        )


def _name_flow_run(name: str) -> None:
    """One name for a run on Prefect's pages, in `make status` and in `make runs`."""
    with suppress(Exception), get_client(sync_client=True) as client:  # a page that does not answer stops no run
        client.update_flow_run(UUID(runtime.flow_run.id), name=name)


def _closed(place: Workspace) -> Path:
    try:
        return workspace.closed(place)
    except UserError as error:  # the run is finished and safe; `make gc` removes what stayed
        get_run_logger().warning("The worktree stays: %s", error)
        return place.root


def run_stages(
    place: Workspace, states: list[dict[str, Any]], checks: Mapping[str, Callable[[], None]] = MappingProxyType({})
) -> list[State]:
    """Every stage in turn; `states` grows by what became of each. `checks` are made behind the stage of that name.

    Returns Prefect's state of the last stage: each waits for the one before, which draws the edges of the run's graph.
    """
    before: list[State] = []
    announced = publish.announce(place)
    for line in place.watch():
        get_run_logger().info("%s", line)
    stale = place.stale()
    for name in place.stages():
        # Behind a stage that did something only DVC knows; before it, one question to DVC answered for all.
        unchanged = name not in stale and all(state["state"] == "cached" for state in states)
        announced = announced or publish.announce(place)  # MLflow gives the run its id seconds after the start
        before = [stage(name, place, unchanged, wait_for=before)]
        states.append(before[0].result())
        checks.get(name, lambda: None)()
    if any(state["state"] != "cached" for state in states) and (stale := place.stale()):
        raise UserError(
            f"The run is over, and {', '.join(sorted(stale))} would have to run again: params.yaml, code or data "
            f"changed meanwhile in {place.root}. Look with `dvc status`, then run again."
        )
    return before


def report(result: dict[str, Any]) -> None:
    place = Workspace(Path(result["workspace"]), result["key"])
    command = [sys.executable, "-m", "tasks.reports.terminal"]
    env = {**place.environment(), "PYTHONPATH": str(ROOT)}  # where a finished run's results lie there is no code
    code = subprocess.run(command, cwd=place.root, env=env).returncode
    if code:
        raise SystemExit(code)


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flows.dpo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", help="a named overlay of params.yaml, from flows/recipes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="train.beta=0.2, as in YAML")
    parser.add_argument("--name", help="of the run, its worktree and its branch")
    parser.add_argument("--only-if-new", action="store_true", help="end at once where nothing is new since last time")
    parser.add_argument("--unregistered", action="store_true", help="leave registry and champion alone")
    parser.add_argument("--resume", metavar="NAME", help="go on with a run that did not finish")
    return parser.parse_args(given)


def override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(f"--set takes KEY=VALUE, as in --set train.beta=0.2, and it got '{text}'.")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"--set {key}: '{value}' is not valid YAML.") from None


def run_here(given: list[str]) -> None:
    asked = arguments(given)
    overrides = dict(override(text) for text in asked.set)
    workspace.plan(asked.recipe, overrides)  # a mistake is told before a server is started
    if asked.resume:
        runs.check_resumable(asked.resume)
    server.start()
    shown = terminal.attach()
    try:
        how = {"only_if_new": asked.only_if_new, "registered": not asked.unregistered}
        result = dpo(recipe=asked.recipe, overrides=overrides, name=asked.name, resume=asked.resume, **how)
    finally:
        shown.end_line()
    if "nothing_new" not in result:
        report(result)


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that what we started is ended


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        run_here(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}" + (f"\nThen {found}" if (found := _own_run()) else ""))
    except StageFailed as error:
        sys.exit(f"error: {error}\nIts output is above. {_again()}")
    except OSError as error:
        if (sentence := disk.explain(error)) is None:
            raise
        sys.exit(f"error: {sentence}\nThen {_again()}")
    except CancelledRun as error:
        sys.exit(f"{error} {_again()}")
    except KeyboardInterrupt:
        print(f"Stopped. {_again()}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _again() -> str:
    return _own_run() or "The same command again continues where it stopped."


def _own_run() -> str:
    """How to go on with this process's run, where it has a worktree: a name is used once."""
    own = [record.name for record in runs.records() if record.pid == os.getpid() and record.own]
    return f"`make resume RUN={own[0]}` goes on where it stopped." if own else ""


if __name__ == "__main__":
    main()
