"""The runs of a sweep: their params and names, and how they run in parallel as processes."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from flows import cancellation, retrain
from flows.child_runs import run_command
from flows.terminal import PROGRESS
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.runs import run_config
from tasks.runs.names import check_name
from tasks.runs.search_space import Space, combinations
from tasks.system import processes
from tasks.system.files import fingerprint, read_json, write_json

FOLDER = ROOT / ".scratch" / "sweeps"
PAUSE = 0.2  # seconds between two checks of the running trials


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    number: int
    name: str
    values: dict[str, Any]

    def command(self, recipe: str | None, overrides: Mapping[str, Any]) -> list[str]:
        return run_command(self.name, recipe, {**overrides, **self.values})


def plan(
    space: Space, *, draws: int | None, seed: int, recipe: str | None, overrides: Mapping[str, Any], name: str | None
) -> tuple[list[Trial], str]:
    """All trials with their validated params, and the sweep's name: an invalid value is reported before any run."""
    planned: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for values in combinations(space, draws, seed):
        params = run_config.resolve(recipe, {**overrides, **values}).values()
        if params not in [earlier for _, earlier in planned]:
            planned.append((values, params))
    content = fingerprint({"params": [params for _, params in planned], "code": retrain.code_hashes()})
    name = name or f"sweep-{content[:6]}"
    width = len(str(len(planned)))
    trials = [
        Trial(number, f"{name}-{number:0{width}d}-{_slug(values)}", values)
        for number, (values, _) in enumerate(planned, start=1)
    ]
    for trial in trials:
        check_name(promotion_of(trial.name))
    _check_same_sweep(name, content)
    return trials, name


def promotion_of(trial: str) -> str:
    """The name of the run that promotes the model of that trial."""
    return f"{trial}-promoted"


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


def run_trials(
    trials: Sequence[Trial],
    runs_at_once: int,
    execute: Callable[[Trial, Callable[[str], None]], int],
    on_end: Callable[[Trial, int, float], None],
    on_progress: Callable[[list[str], int], None],
) -> None:
    """Run all trials; none stops another. A stage that several of them need is computed once (flows/stage.py).

    `execute` runs one trial and returns its exit code. `on_end` gets each trial's exit code and seconds, `on_progress`
    the state of each running trial and the number of waiting ones.
    """
    progress: dict[int, str] = {}  # of the running trials, by number

    def run(trial: Trial) -> tuple[int, float]:
        def on_line(line: str) -> None:
            if match := PROGRESS.match(line):
                progress[trial.number] = f"{match['stage']} {match['done']}/{match['total']}"

        progress[trial.number] = "starting"
        began = time.monotonic()
        return execute(trial, on_line), time.monotonic() - began

    with ThreadPoolExecutor(runs_at_once) as pool:
        unfinished = {pool.submit(run, trial): trial for trial in trials}
        try:
            while unfinished:
                ended, _ = wait(unfinished, timeout=PAUSE, return_when=FIRST_COMPLETED)
                cancellation.stop_if_noticed()
                for future in ended:
                    trial = unfinished.pop(future)
                    del progress[trial.number]
                    on_end(trial, *future.result())
                active = [f"{number} {state}" for number, state in progress.copy().items()]
                on_progress(active, len(unfinished) - len(active))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in unfinished):  # we are cancelled or stopped
                processes.terminate_awaited()
                time.sleep(PAUSE)
