"""The flow `dpo`: a task per stage of dvc.yaml, a check that nothing is stale, then promote and publish.

`dpo run` runs it in this process; `prefect deployment run dpo/full` runs it on a worker (infra/prefect.yaml).
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow, get_client, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import artifacts, cancellation, embedded_server, promote, retrain, terminal
from flows.parameters import NO_NAME, NO_RECIPE, Name, Overrides, Recipe
from flows.stage import stage
from services import prefect_internals
from tasks.checkout import kept_checkout
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.lifecycle.run_workspace import (
    change_configuration,
    check_free,
    close_workspace,
    commit_results,
    new_record,
    open_workspace,
)
from tasks.runs import commits, records, run_config
from tasks.runs.records import RunRecord
from tasks.runs.run_config import RunConfig
from tasks.runs.workspace import Workspace, ray_kept
from tasks.system import processes

# The configuration of a run that this process starts by itself: a flow's parameters must be JSON.
_resolved_before: ContextVar[RunConfig | None] = ContextVar("resolved_before", default=None)


@flow
@cancellation.ends_cancelled
@kept_checkout(ROOT)
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
        recipe: a named overlay of params.yaml from flows/recipes; none: params.yaml as it is.
        name: name of the run, its worktree and its branch runs/<name>; by default Prefect's name for the flow run.
        resume: the name of an unfinished run to continue. It keeps its recipe; overrides change its configuration.
        only_if_new: finish at once if nothing changed since the last finished run, and stop if the data has drifted
            (docs/retraining.md).
        registered: register the model and let the gate decide about promoting it; a sweep's runs do not.
        overrides: values of params.yaml by dotted name, {"train.beta": 0.2}.
    """
    if _on_a_worker():
        processes.exit_with_parent()
    began = datetime.now().astimezone()
    if resume:
        record = _resumed(resume, recipe, overrides, name)
    else:
        config = _resolved_before.get() or run_config.resolve(recipe, overrides)
        started_with = retrain.started_with(config)
        if only_if_new and (reason := retrain.nothing_new(config, started_with)):
            get_run_logger().info("retrain: %s", reason)
            return Completed(message=reason, data={"nothing_new": reason})
        record = _new(config, name, started_with)
    started_with, outcome = record.started_with, None
    with open_workspace(record, runtime.flow_run.id) as workspace:
        _rename_flow_run(workspace.run_name)
        _log_worktree(workspace)
        with artifacts.recorded(workspace, {} if resume else {"recipe": recipe or "none"}) as states:
            drift = {"prepare": lambda: retrain.check_drift(workspace, retrain.last_run(started_with))}
            last = run_stages(workspace, states, drift if only_if_new else {})
            commit_results(workspace)
            if registered:
                states.append(promote.promote(workspace, wait_for=last))
            artifacts.publish(workspace, states)
            if registered:
                outcome = retrain.outcome(workspace, began, started_with, retrain.last_run(started_with))
    retrain.write(outcome, started_with)
    # The workspace is unlocked while the run waits for a person.
    if registered and not embedded_server.embedded():
        promote.ask_for_approval(workspace)
    return {"run": workspace.run_name, "workspace": str(_close(workspace)), "stages": states}


def _resumed(run: str, recipe: str | None, overrides: dict[str, Any] | None, name: str | None) -> RunRecord:
    record = records.check_resumable(run)
    if recipe or name:
        raise UserError(f"The run {record.name} keeps its recipe and name when it is resumed. Give only overrides.")
    return change_configuration(record, overrides) if overrides else record


def _new(config: RunConfig, name: str | None, started_with: dict[str, Any]) -> RunRecord:
    flow_run = runtime.flow_run.id
    worktree = bool(name or config.files) or _on_a_worker()
    name = name or records.default_name(runtime.flow_run.name, flow_run)
    return new_record(name, config.files, worktree=worktree, flow_run=flow_run, started_with=started_with)


def _on_a_worker() -> bool:
    """Whether a deployment started this flow, or a flow around it: then it must not work in the checkout."""
    return runtime.deployment.id is not None or prefect_internals.on_a_worker()


def _log_worktree(workspace: Workspace) -> None:
    if not workspace.is_worktree:
        return
    log = get_run_logger()
    log.info("Run %s works in its own worktree %s", workspace.run_name, workspace.root)
    if excluded := [name for name in commits.untracked() if not commits.is_run_code(name)]:
        names = ", ".join(excluded[:5]) + (f" and {len(excluded) - 5} more" if len(excluded) > 5 else "")
        log.info(
            "Untracked files that are not in the worktree: %s. Data is read from the checkout; `git add` includes the "
            "others.",
            names,
        )


def _rename_flow_run(name: str) -> None:
    """Give the flow run the same name on Prefect's pages, in `dpo status` and in `dpo runs`."""
    with suppress(Exception), get_client(sync_client=True) as client:  # a page that does not answer stops no run
        client.update_flow_run(UUID(runtime.flow_run.id), name=name)


def _close(workspace: Workspace) -> Path:
    try:
        return close_workspace(workspace)
    except UserError as error:  # the run is finished and its results are kept; `dpo gc` removes the worktree later
        get_run_logger().warning("The worktree stays: %s", error)
        return workspace.root


def run_stages(
    workspace: Workspace, states: list[dict[str, Any]], checks: Mapping[str, Callable[[], None]]
) -> list[State]:
    """Run every stage in order and append its state to `states`; `checks` run after the stage of that name.

    Returns Prefect's state of the last stage: each stage waits for the one before, which draws the run's graph.
    """
    announced = artifacts.announce(workspace)
    for line in workspace.fingerprint():
        get_run_logger().info("%s", line)
    stale = workspace.stale_stages()
    previous: list[State] = []
    with ray_kept(workspace, stale) as workspace:
        for name in workspace.stages():
            # `dvc status` covers all stages until the first one runs; after that DVC decides stage by stage.
            unchanged = name not in stale and all(state["state"] == "cached" for state in states)
            if workspace.is_disabled(name):  # later stages depend on its empty output; no page lists the stage
                if not unchanged:
                    workspace.dvc("repro", "--single-item", name)
                continue
            announced = announced or artifacts.announce(workspace)  # the run gets its MLflow id after seconds
            previous = [stage(name, workspace, unchanged, wait_for=previous)]
            states.append(previous[0].result())
            if name in checks:
                checks[name]()
    if any(state["state"] != "cached" for state in states) and (stale := workspace.stale_stages()):
        raise UserError(
            f"All stages have run, but {', '.join(sorted(stale))} would have to run again: params.yaml, code or data "
            f"changed during the run in {workspace.root}. See `dvc status`, then run again."
        )
    return previous


def report(result: dict[str, Any]) -> None:
    workspace = Workspace(Path(result["workspace"]), result["run"])
    command = [sys.executable, "-m", "tasks.reports.terminal"]
    env = {**workspace.environment(), "PYTHONPATH": str(ROOT)}  # the folder of a finished run's results has no code
    if code := subprocess.run(command, cwd=workspace.root, env=env).returncode:
        raise SystemExit(code)


def run_here(
    recipe: str | None = None,
    overrides: dict[str, Any] | None = None,
    name: str | None = None,
    resume: str | None = None,
    **options: bool,
) -> None:
    """Run the flow in this process, on the server of `dpo up` or an embedded one, and print the result."""
    config = None
    if resume:  # a mistake is reported before a server is started
        record = records.check_resumable(resume)
        if overrides:
            change_configuration(record, overrides)
            overrides = {}
    else:
        config = run_config.resolve(recipe, overrides)
        if name:
            check_free(name)
    token = _resolved_before.set(config)
    try:
        with terminal.attached():
            result: dict[str, Any] = dpo(recipe=recipe, overrides=overrides or {}, name=name, resume=resume, **options)  # type: ignore[assignment]
    finally:
        _resolved_before.reset(token)
    if "nothing_new" not in result:
        report(result)
