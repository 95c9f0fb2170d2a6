"""The runs of a sweep: their params and names, and how they run in parallel as processes."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from flows import cancellation, retrain
from flows.child_runs import run_command
from flows.terminal import PROGRESS
from tasks.config.params import Params
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.runs import dvc_lock, run_config
from tasks.runs.search_space import Space, combinations
from tasks.system import processes
from tasks.system.files import fingerprint, read_json, write_json

FOLDER = ROOT / ".scratch" / "sweeps"
SHARED_STAGE = "reference"  # the last stage that trials may have in common
PAUSE = 0.2  # seconds between two looks at the running trials


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    number: int
    name: str
    values: dict[str, Any]
    params: dict[str, Any]  # all of params.yaml

    @property
    def group(self) -> str:
        """Trials of one group share everything up to the reference."""
        return fingerprint({section: self.params[section] for section in ("source", "prepare", "reference")})

    def command(self, recipe: str | None, overrides: Mapping[str, Any]) -> list[str]:
        return run_command(self.name, recipe, {**overrides, **self.values})


def plan(
    space: Space, *, draws: int | None, seed: int, recipe: str | None, overrides: Mapping[str, Any], name: str | None
) -> tuple[list[Trial], str]:
    """All trials with their validated params, and the sweep's name: an invalid value is reported before any run."""
    planned: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for values in combinations(space, draws, seed):
        files = run_config.changed_files(recipe, {**overrides, **values})
        params = retrain.params_and_code(files)["params"]
        if params not in [earlier for _, earlier in planned]:
            planned.append((values, params))
    content = fingerprint({"params": [params for _, params in planned], "code": retrain.code_hashes(ROOT)})
    name = name or f"sweep-{content[:6]}"
    _check_same_sweep(name, content)
    width = len(str(len(planned)))
    trials = [
        Trial(number, f"{name}-{number:0{width}d}-{_slug(values)}", values, params)
        for number, (values, params) in enumerate(planned, start=1)
    ]
    # The first trial of a group must be one that computes the reference, if any of them needs it.
    return sorted(trials, key=lambda trial: not Params.model_validate(trial.params).train.needs_reference), name


def _check_same_sweep(name: str, content: str) -> None:
    """A sweep continues under its name only if its trials would be the same."""
    path = FOLDER / name / "sweep.json"
    if path.exists() and read_json(path)["content"] != content:
        raise UserError(
            f"There is another sweep named {name}: its search space, params.yaml or code differ. Choose another --name."
        )
    write_json(path, {"content": content})


def _slug(values: Mapping[str, Any]) -> str:
    """The values in a form that a branch name allows."""
    text = "-".join(f"{key.split('.')[-1]}-{value}" for key, value in values.items())
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).replace(".-", "-").strip("-.").lower()[:40].rstrip("-.")


def startable(
    waiting: Iterable[Trial], running: Iterable[Trial], past_reference: set[str], runs_at_once: int
) -> list[Trial]:
    """The trials that may start now. The first of a group runs alone until it is past the reference."""
    groups = [trial.group for trial in running]
    chosen: list[Trial] = []
    for trial in waiting:
        if len(groups) < runs_at_once and (trial.group in past_reference or trial.group not in groups):
            chosen.append(trial)
            groups.append(trial.group)
    return chosen


def run_trials(
    trials: Sequence[Trial],
    runs_at_once: int,
    execute: Callable[[Trial, Callable[[str], None]], int],
    on_end: Callable[[Trial, int, float], None],
    on_progress: Callable[[list[str], int], None],
) -> None:
    """Run all trials; none stops another.

    `execute` runs one trial and returns its exit code. `on_end` gets each trial's exit code and seconds, `on_progress`
    what the running trials are doing and how many wait.
    """
    waiting, past_reference, later_stage = list(trials), set[str](), _later_stages()
    running: dict[Future[tuple[int, float]], Trial] = {}
    doing: dict[int, str] = {}

    def run(trial: Trial) -> tuple[int, float]:
        def on_line(line: str) -> None:
            if match := PROGRESS.match(line):
                doing[trial.number] = f"{match['stage']} {match['done']}/{match['total']}"
            if later_stage.match(line):
                past_reference.add(trial.group)

        began = time.monotonic()
        return execute(trial, on_line), time.monotonic() - began

    with ThreadPoolExecutor(runs_at_once) as pool:
        try:
            while waiting or running:
                for trial in startable(waiting, running.values(), past_reference, runs_at_once):
                    waiting.remove(trial)
                    running[pool.submit(run, trial)] = trial
                ended, _ = wait(running, timeout=PAUSE, return_when=FIRST_COMPLETED)
                cancellation.stop_if_noticed()
                for future in ended:
                    on_end(running.pop(future), *future.result())
                active = [f"{trial.number} {doing.get(trial.number, 'starting')}" for trial in running.values()]
                on_progress(active, len(waiting))
        finally:
            while not all(future.done() for future in running):  # we are cancelled or stopped
                processes.terminate_awaited()
                time.sleep(PAUSE)


def _later_stages() -> re.Pattern[str]:
    """A line of any stage after the shared ones."""
    stages = list(dvc_lock.all_stages(ROOT))
    later = stages[stages.index(SHARED_STAGE) + 1 :] if SHARED_STAGE in stages else stages
    return re.compile(rf"^({'|'.join(later)}): ")
