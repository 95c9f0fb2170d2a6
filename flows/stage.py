"""The one task: run a stage of dvc.yaml, stream its output and progress into Prefect, say `ran` or `cached`.

DVC decides whether the stage must run; here is only how it is run, watched and, where that can help, run again.
"""

import re
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Task, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed

from flows import ROOT, cancellation, child, inputs
from flows.workspace import Workspace
from tasks import disk
from tasks.errors import UserError
from tasks.machines.lock import alone
from tasks.redact import redact

PROGRESS = re.compile(r"^(?P<stage>\w+): (?P<done>\d+)/(?P<total>\d+) ")
OUTCOME = {  # what DVC says about a stage
    re.compile(r"^Running stage '"): "ran",
    re.compile(r"^Stage '.*' is cached - skipping run"): "restored",
    re.compile(r"^Stage '.*' didn't change, skipping"): "cached",
}
CHATTER = re.compile(
    r"^$|^> |^\t(git add|dvc config)|^(Running|Stage|Verifying|Updating lock|Generating lock|To track the changes|"
    r"To enable auto staging|Use `dvc push`|Data and pipelines are up to date|ERROR: failed to reproduce|"
    r"WARNING: Process .* in RWLock-file)"
)
USER_ERROR = 2  # a stage's exit code for what its user can mend
EXITED = re.compile(r"^ERROR: .*exited with (?P<code>-?\d+)")
NAMES = {"restored": "Restored", "cached": "Cached"}
SAID = {"restored": "restored from DVC's run cache", "cached": "unchanged, not run"}  # one that ran speaks itself


class StageFailed(Exception):
    """A stage ended in a way that a second try may mend."""


def worth_another_try(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    again = isinstance(error, StageFailed)
    if again and run.run_count <= task.retries:
        get_run_logger().warning("%s: failed, trying again. %s", run.name, error)
    return again


@task(
    task_run_name="{name}",
    retries=2,
    retry_delay_seconds=[2, 5],
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,  # whether a stage must run is DVC's to say
)
def stage(name: str, workspace: Workspace, unchanged: bool) -> State[dict[str, Any]]:
    """Completed, with a name of its own where nothing was computed, so that Prefect's pages tell the two apart."""
    start = time.monotonic()
    state = "cached" if unchanged else _reproduce(name, workspace)
    if state in SAID:
        get_run_logger().info("%s: %s", name, SAID[state])
    result = {"stage": name, "state": state, "seconds": round(time.monotonic() - start, 1)}
    return Completed(name=NAMES.get(state), message=SAID.get(state), data=result)


def _reproduce(name: str, workspace: Workspace) -> str:
    watch = Watch(name, workspace.root)
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", name]
    with _once(name, workspace):
        cancellation.stop_if_noticed()
        code = child.run(command, workspace.root, workspace.environment(), watch)
    cancellation.stop_if_noticed()
    if code != 0:
        raise watch.error(code)
    if watch.state == "ran":
        watch.progress(1, 1)
    return watch.state


def _once(name: str, workspace: Workspace) -> AbstractContextManager[None]:
    """Of two runs that would compute the same at once the second waits, and DVC gives it what the first made."""
    address = inputs.address(workspace.root, name)
    if address is None:
        return nullcontext()
    say = get_run_logger().info
    return alone(
        ROOT / ".scratch" / "locks" / f"{name}-{address}",
        lambda who: say("%s: another run (%s) computes the same; waiting for its result", name, who),
    )


class Watch:
    """What a stage's output tells: its progress, DVC's decision, and the sentence of a user's mistake."""

    def __init__(self, stage: str, root: Path) -> None:
        self.stage, self.root = stage, root
        self.state = "cached"
        self.lines: list[str] = []
        self.held: list[str] = []  # from `error: ` on: a user's mistake is said once, at the end
        self.log = get_run_logger()
        self.artifact: UUID | None = None

    def __call__(self, line: str) -> None:
        line = redact(line)
        self.lines = [*self.lines[-200:], line]
        self.state = next((state for pattern, state in OUTCOME.items() if pattern.search(line)), self.state)
        if match := PROGRESS.match(line):
            self.progress(int(match["done"]), int(match["total"]))
        if CHATTER.search(line):
            return
        if self.held or line.startswith("error: "):
            self.held.append(line)
        else:
            self.log.info("%s", line)

    def progress(self, done: int, total: int) -> None:
        percent = min(100.0, 100 * done / max(total, 1))
        try:
            if self.artifact is None:
                self.artifact = _progress_artifact(self.stage, percent)
            else:
                update_progress_artifact(self.artifact, progress=percent)
        except Exception as error:  # a page that does not answer is no reason to stop a training run
            self.log.debug("%s: progress is not shown: %s", self.stage, error)

    def error(self, code: int) -> Exception:
        exited = [match["code"] for line in self.lines if (match := EXITED.match(line))]
        if self.held and exited and int(exited[-1]) == USER_ERROR:
            return UserError("\n".join(self.held).removeprefix("error: "))
        if any(disk.FULL.search(line) for line in self.lines):  # DVC's own word for it; another try finds it full, too
            return UserError(f"{self.stage}: {disk.full(self.root)}")
        for line in self.held:
            self.log.info("%s", line)
        own = [line for line in self.lines if not CHATTER.search(line) and not PROGRESS.match(line)]
        said = own or [line for line in self.lines if line.startswith("ERROR: ")]
        how = f"exit code {exited[-1]}" if exited else f"DVC's exit code {code}"
        last = f" It last said: {said[-1]}" if said else ""
        return StageFailed(f"The stage {self.stage} failed with {how}.{last}")


def _progress_artifact(stage: str, percent: float) -> UUID:
    made = create_progress_artifact(percent, key=f"{stage}-progress", description=f"How far the stage {stage} is")
    assert isinstance(made, UUID)
    return made
