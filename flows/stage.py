"""The task that runs a stage of dvc.yaml, streams its output and progress into Prefect, and retries after a crash.

DVC decides whether the stage must run.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed

from flows import cancellation
from flows.terminal import PROGRESS
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.lifecycle import reuse
from tasks.runs import dvc
from tasks.runs.workspace import Workspace
from tasks.secrets.redact import redact
from tasks.system import disk, processes
from tasks.system.lock import exclusive

USER_ERROR = 2  # a stage's exit code for a mistake of its user
MESSAGES = {"restored": "restored from DVC's run cache", "cached": "unchanged, not run"}


class StageFailed(Exception):
    """A stage failed in a way that a retry may solve."""


def should_retry(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    retry = isinstance(error, StageFailed)
    if retry and run.run_count <= task.retries:
        get_run_logger().warning("%s: failed, trying again. %s", run.name, error)
    return retry


retried: Any = partial(  # decorates the tasks that run again after a crash
    task,
    retries=2,
    retry_delay_seconds=[2, 5],
    retry_condition_fn=should_retry,
    cache_policy=NO_CACHE,  # DVC decides whether a stage must run
)


@retried(task_run_name="{name}")
def stage(name: str, workspace: Workspace, unchanged: bool) -> State[dict[str, Any]]:
    """Completed; the state is named Cached or Restored on Prefect's pages if nothing was computed."""
    start = time.monotonic()
    state = "cached" if unchanged else _reproduce(name, workspace)
    result = {"stage": name, "state": state, "seconds": round(time.monotonic() - start, 1)}
    if state not in MESSAGES:
        return Completed(data=result)
    get_run_logger().info("%s: %s", name, MESSAGES[state])
    return Completed(name=state.capitalize(), message=MESSAGES[state], data=result)


def _reproduce(name: str, workspace: Workspace) -> str:
    output = StageOutput(name, workspace.root)
    with _computed_once(name, workspace):
        cancellation.stop_if_noticed()
        code = processes.run(dvc.repro_command(name), workspace.root, workspace.environment(), output)
    cancellation.stop_if_noticed()
    if code != 0:
        raise output.error(code)
    if output.state == "ran":
        output.progress(1, 1)
    return output.state


def _computed_once(name: str, workspace: Workspace) -> AbstractContextManager[None]:
    """If two runs would compute the same at once, the second waits, and DVC gives it the result of the first."""
    inputs = reuse.input_hash(workspace.root, name)
    if inputs is None:
        return nullcontext()
    log = get_run_logger()
    return exclusive(
        ROOT / ".scratch" / "locks" / f"{name}-{inputs}",
        lambda holder: log.info("%s: another run (%s) computes the same; waiting for its result", name, holder),
    )


class StageOutput:
    """Reads a stage's output: its progress, DVC's decision, and the message of a user error."""

    def __init__(self, stage: str, root: Path) -> None:
        self.stage, self.root = stage, root
        self.state = "cached"
        self.lines: list[str] = []
        self.error_lines: list[str] = []  # from `error: ` on: a user error is shown once, at the end of the run
        self.log = get_run_logger()
        self.artifact: Any = None  # its id, once there is one

    def __call__(self, line: str) -> None:
        line = redact(line)
        self.lines = [*self.lines[-200:], line]
        self.state = next((state for pattern, state in dvc.STAGE_STATES.items() if pattern.search(line)), self.state)
        if match := PROGRESS.match(line):
            self.progress(int(match["done"]), int(match["total"]))
        if dvc.NOISE.search(line):
            return
        if self.error_lines or line.startswith("error: "):
            self.error_lines.append(line)
        else:
            self.log.info("%s", line)

    def progress(self, done: int, total: int) -> None:
        percent = min(100.0, 100 * done / max(total, 1))
        try:
            if self.artifact is None:
                key, description = f"{self.stage}-progress", f"Progress of the stage {self.stage}"
                self.artifact = create_progress_artifact(percent, key=key, description=description)
            else:
                update_progress_artifact(self.artifact, progress=percent)
        except Exception as error:  # a page that does not answer must not stop a training run
            self.log.debug("%s: cannot show progress: %s", self.stage, error)

    def error(self, code: int) -> Exception:
        exit_codes = [match["code"] for line in self.lines if (match := dvc.EXIT_CODE.match(line))]
        if self.error_lines and exit_codes and int(exit_codes[-1]) == USER_ERROR:
            return self.user_error()
        if any(disk.FULL.search(line) for line in self.lines):  # a retry would find the disk full, too
            return UserError(f"{self.stage}: {disk.explain_full(self.root)}")
        for line in self.error_lines:
            self.log.info("%s", line)
        own = [line for line in self.lines if not dvc.NOISE.search(line) and not PROGRESS.match(line)]
        own = own or [line for line in self.lines if line.startswith("ERROR: ")]
        exit_code = f"exit code {exit_codes[-1]}" if exit_codes else f"DVC's exit code {code}"
        last = f" Its last line: {own[-1]}" if own else ""
        return StageFailed(f"The stage {self.stage} failed with {exit_code}.{last}")

    def user_error(self) -> UserError:
        return UserError("\n".join(self.error_lines).removeprefix("error: "))
