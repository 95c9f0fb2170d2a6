"""The flow `dpo`: a task per stage of dvc.yaml, then proof that nothing is stale, then promote, then publish.

`python -m flows.dpo [--recipe NAME] [--set train.beta=0.2 ...]` runs it here, on Prefect's embedded server;
`prefect deployment run dpo/full` runs it on a worker (infra/prefect.yaml).
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from prefect import flow, get_run_logger, runtime

from flows import promote, publish, server, terminal, workspace
from flows.stage import StageFailed, stage
from flows.workspace import Workspace
from tasks.errors import UserError


@flow
def dpo(recipe: str | None = None, overrides: dict[str, Any] | None = None, name: str | None = None) -> dict[str, Any]:
    """From preference data to a registered model.

    Args:
        recipe: a named overlay of params.yaml, from flows/recipes.
        overrides: values of params.yaml by dotted name, {"train.beta": 0.2}.
        name: of the run's worktree and branch, when recipe or overrides change params.yaml.
    """
    key = f"{runtime.flow_run.name}-{runtime.flow_run.id[:8]}"
    files = workspace.plan(recipe, overrides)
    with workspace.opened(key, name, files) as place, publish.recorded(place, recipe) as states:
        if place.own:
            _say_where(place)
        run_stages(place, states)
        states.append(promote.promote(place))
        publish.publish(place, states)
    if promote.waits_for_a_person(place) and not server.embedded():  # the workspace is free meanwhile
        promote.ask_a_person(place)
    return {"key": key, "workspace": str(place.root), "stages": states}


def _say_where(place: Workspace) -> None:
    log = get_run_logger()
    log.info("Works in %s, a worktree of its own", place.root)
    if left_out := workspace.untracked():
        log.warning("Left out of the worktree, being untracked: %s. `git add` takes them in.", ", ".join(left_out))


def run_stages(place: Workspace, states: list[dict[str, Any]]) -> None:
    """Every stage in turn; `states` grows by what became of each."""
    stale, moved = place.stale(), place.source_changed()
    for name in place.stages():
        # Behind a stage that did something only DVC knows; before it, one question to DVC answered for all.
        force = name == "source" and moved
        unchanged = not force and name not in stale and all(state["state"] == "cached" for state in states)
        states.append(stage(name, place, unchanged, force))
    if any(state["state"] != "cached" for state in states) and (stale := place.stale()):
        raise UserError(
            f"The run is over, and {', '.join(sorted(stale))} would have to run again: params.yaml, code or data "
            f"changed meanwhile in {place.root}. Look with `dvc status`, then run again."
        )


def report(result: dict[str, Any]) -> None:
    place = Workspace(Path(result["workspace"]), result["key"])
    command = [sys.executable, "-m", "tasks.report"]
    code = subprocess.run(command, cwd=place.root, env=place.environment()).returncode
    if code:
        raise SystemExit(code)


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flows.dpo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", help="a named overlay of params.yaml, from flows/recipes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="train.beta=0.2, as in YAML")
    parser.add_argument("--name", help="of the run's worktree and branch")
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
    server.start()
    shown = terminal.attach()
    try:
        result = dpo(recipe=asked.recipe, overrides=overrides, name=asked.name)
    finally:
        shown.end_line()
    report(result)


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that what we started is ended


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        run_here(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    except StageFailed as error:
        sys.exit(f"error: {error}\nIts output is above. The same command again continues where it stopped.")
    except KeyboardInterrupt:
        print("Stopped. The same command again continues where it stopped.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
