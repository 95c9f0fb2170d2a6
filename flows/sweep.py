"""The flow `sweep`: a grid or a random search over params.yaml, as runs of the pipeline in parallel.

    dpo sweep --space train.beta=0.05,0.1 --space 'train.loss={sigmoid: 1.0},{ipo: 1.0}' --runs-at-once 2
    dpo sweep --space train.learning_rate=log:1.0e-5..1.0e-3 --random 8 --metric eval/rewards/margins

Each trial is a `dpo run` in its own worktree, and none is registered: with --promote the best one goes through the
gate. The same command again continues an interrupted sweep and does not repeat finished runs.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prefect import flow, get_run_logger

from flows import cancellation, embedded_server, sweep_artifacts, terminal
from flows.child_runs import environment, execute, resume_command, run_command
from flows.parameters import NO_NAME, NO_RECIPE, Name, Overrides, Recipe
from flows.sweep_trials import FOLDER, Trial, plan, promotion_of, run_trials
from tasks.checkout import kept_checkout
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.reports import sweep_table
from tasks.reports.summary import RunSummary
from tasks.runs import records
from tasks.runs.search_space import Space, parse
from tasks.system import processes
from tasks.system.files import read_json_or_empty

METRIC = "eval/rewards/accuracies"


@flow
@cancellation.ends_cancelled
def sweep(
    space: Space,
    metric: str = METRIC,
    goal: Literal["max", "min"] = "max",
    runs_at_once: int = 2,
    random: int | None = None,
    seed: int = 0,
    recipe: Recipe = NO_RECIPE,
    overrides: Overrides = {},  # noqa: B006 (None would make a form that asks for a type)
    name: Name = NO_NAME,
    promote: bool = False,
) -> dict[str, Any]:
    """Many runs that share one reference: a table, a figure, and the best run.

    Args:
        space: values to try by dotted name, {"train.beta": [0.05, 0.1]}, or a range {"low": 0.05, "high": 0.5}.
        metric: the metric to compare, as MLflow names it.
        goal: max if a higher value is better, min if a lower one is.
        runs_at_once: how many runs work in parallel.
        random: how many combinations to draw; by default all are tried.
        seed: seed of the draws.
        recipe: a named overlay of params.yaml, for all runs.
        overrides: values of params.yaml by dotted name, for all runs.
        name: name of the sweep; by default made from its content.
        promote: let the best run's model through the gate at the end.
    """
    overrides = overrides or {}
    trials, name = plan(space, draws=random, seed=seed, recipe=recipe, overrides=overrides, name=name)
    work = Sweep(name, trials, metric, goal, recipe, overrides)
    work.run(runs_at_once)
    result = work.result()
    with kept_checkout(ROOT):
        sweep_artifacts.publish(result, work.folder)
    if promote:
        cancellation.stop_if_cancelled()
        work.promote(result)
    return result


@dataclass
class Sweep:
    """The trials of a sweep and their outcomes."""

    name: str
    trials: list[Trial]
    metric: str
    goal: str
    recipe: str | None
    overrides: dict[str, Any]
    errors: dict[str, str] = field(default_factory=dict)  # by trial
    seconds: dict[str, float] = field(default_factory=dict)  # by trial
    log: Any = field(default_factory=get_run_logger)
    last_status: str = ""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def run(self, runs_at_once: int) -> None:
        if runs_at_once < 1:
            raise UserError(f"--runs-at-once {runs_at_once}: it must be at least 1.")
        finished = [trial for trial in self.trials if self.finished(trial)]
        for trial in finished:
            self._check_metric(trial)
            self.log.info("%s: finished before", trial.name)
        trials = [trial for trial in self.trials if trial not in finished]
        at_once = min(runs_at_once, max(1, len(trials)))
        self.log.info("Sweep %s: %d runs, %d at a time", self.name, len(trials), at_once)
        run_trials(trials, runs_at_once, self._execute, self._on_end, self._on_progress)
        if len(self.errors) == len(self.trials):
            errors = " ".join(map(self._failure, self.trials))
            raise UserError(f"No run of the sweep {self.name} finished. {errors}")

    def _execute(self, trial: Trial, on_line: Callable[[str], None]) -> int:
        """Start a trial, or resume it in its own worktree with its own run in MLflow; its exit code."""
        is_started = records.read_record(trial.name) is not None
        command = resume_command(trial.name) if is_started else trial.command(self.recipe, self.overrides)
        with self._log_file(trial).open("w", buffering=1) as log:

            def copy(line: str) -> None:
                log.write(f"{line}\n")
                on_line(line)

            return processes.run([*command, "--unregistered"], ROOT, environment({"sweep": self.name}), copy)

    def _log_file(self, trial: Trial) -> Path:
        return self.folder / f"{trial.name}.log"

    def finished(self, trial: Trial) -> records.RunRecord | None:
        """The record of a trial that finished."""
        record = records.read_record(trial.name)
        return record if record and record.state == records.FINISHED else None

    def metrics(self, trial: Trial) -> dict[str, float]:
        record = self.finished(trial)
        return RunSummary.of(record).metrics if record else {}

    def result(self) -> dict[str, Any]:
        rows = sweep_table.ranked([self._row(trial) for trial in self.trials], self.goal)
        _, command = self._promotion(rows[0])
        return {
            "sweep": self.name,
            "metric": self.metric,
            "goal": self.goal,
            "best": rows[0]["name"],
            "promote": shlex.join(["dpo", *command[3:]]),
            "rows": rows,
            "ids": [ids for row in rows if row["logs"] and (ids := read_json_or_empty(Path(row["logs"]) / "run.json"))],
            "failed": sorted(self.errors),
        }

    def promote(self, result: Mapping[str, Any]) -> None:
        """Run the best trial once more, which computes nothing again, and this time let it through the gate."""
        name, command = self._promotion(result["rows"][0])
        record = records.read_record(name)
        if record and record.state == records.FINISHED:
            self.log.info("%s went through the gate already", name)
            return
        if code := execute(resume_command(name) if record else command, {"sweep": self.name}):
            raise UserError(f"The best run was not promoted: {name} ended with exit code {code}. Its output is above.")

    def _promotion(self, best: Mapping[str, Any]) -> tuple[str, list[str]]:
        """The name of the run that promotes the model of the best trial's row, and its command."""
        name = promotion_of(best["name"])
        return name, run_command(name, self.recipe, {**self.overrides, **best["values"]})

    def _row(self, trial: Trial) -> dict[str, Any]:
        metrics, record = self.metrics(trial), self.finished(trial)
        low, high = sweep_table.interval(metrics, self.metric) or (None, None)
        seconds = sum(state["seconds"] for state in records.stage_states(record)) if record else 0.0
        return {
            "name": trial.name,
            "values": trial.values,
            "metric": metrics.get(self.metric),
            "low": low,
            "high": high,
            "state": "finished" if record else "failed",
            "why": self.errors.get(trial.name, ""),
            "seconds": seconds or self.seconds.get(trial.name, 0.0),
            "logs": str(record.folder) if record else "",
            "page": embedded_server.flow_page(record.flow_runs[-1] if record else None),
        }

    def _on_end(self, trial: Trial, code: int, seconds: float) -> None:
        self.seconds[trial.name] = seconds
        if code == 0 and self.finished(trial):
            self._check_metric(trial)
            value = self.metrics(trial)[self.metric]
            self.log.info("%s: finished in %.0f s, %s %.4g", trial.name, seconds, self.metric, value)
            return
        lines = self._log_file(trial).read_text(errors="replace").splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        error = " ".join(lines[starts[-1] :]) if starts else "".join(lines[-1:]) or "no output"
        self.errors[trial.name] = error.removeprefix("error: ")
        self.log.warning("%s", self._failure(trial))

    def _failure(self, trial: Trial) -> str:
        return f"{trial.name} failed: {self.errors[trial.name]} (log: {self._log_file(trial)})"

    def _check_metric(self, trial: Trial) -> None:
        """An unknown metric ends the sweep with its first run, not with its last."""
        sweep_table.check_metric(self.metric, self.metrics(trial), trial.name)

    def _on_progress(self, active: list[str], waiting: int) -> None:
        ended = len(self.trials) - waiting - len(active)
        status = f"sweep: {ended}/{len(self.trials)} runs" + (f"; running: {', '.join(active)}" if active else "")
        if status != self.last_status:
            self.log.info("%s", status)
        self.last_status = status


def run_here(space: list[str], overrides: dict[str, Any], promote: bool = False, **options: Any) -> int:
    """Run the sweep in this process and print its table; the exit code."""
    values = dict(parse(text) for text in space)
    planned = {"draws": options["random"], **{key: options[key] for key in ("seed", "recipe", "name")}}
    plan(values, overrides=overrides, **planned)  # a mistake is reported before a server is started
    with terminal.attached():
        result = sweep(space=values, overrides=overrides, promote=promote, **options)
    sweep_table.show(result["rows"], result["metric"], sweep_artifacts.next_steps(result))
    return 1 if result["failed"] else 0
