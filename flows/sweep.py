"""The flow `sweep`: a grid or a random search over params.yaml, as runs of the pipeline side by side.

    python -m flows.sweep --space train.beta=0.05,0.1 --space 'train.loss={sigmoid: 1.0},{ipo: 1.0}' --runs-at-once 2
    python -m flows.sweep --space train.learning_rate=log:1.0e-5..1.0e-3 --random 8 --metric eval/rewards/margins

Each run is `python -m flows.dpo` in a worktree of its own, and none becomes champion: with --promote the best goes
through the gate. The same command again goes on where it stopped: finished runs are not repeated.
"""

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, Literal

from prefect import flow, get_run_logger
from prefect.exceptions import CancelledRun

from flows import ROOT, cancellation, child, runs, server, side_by_side, summary, terminal
from flows.dpo import override
from flows.side_by_side import Running
from flows.space import Space, parse
from flows.trials import FOLDER, Trial, plan
from tasks.errors import UserError
from tasks.files import read_json
from tasks.output import as_command
from tasks.reports import sweeps

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
    recipe: str | None = None,
    overrides: dict[str, Any] | None = None,
    name: str | None = None,
    promote: bool = False,
) -> dict[str, Any]:
    """Many runs over one reference artefact: a table, a figure, and the best run.

    Args:
        space: values to try by dotted name, {"train.beta": [0.05, 0.1]}, or a range {"low": 0.05, "high": 0.5}.
        metric: what is compared, as MLflow shows it.
        goal: max where more of the metric is better, min where less is.
        runs_at_once: so many work at the same time.
        random: so many combinations are drawn; without it all are tried.
        seed: of the draws.
        recipe: a named overlay of params.yaml, for all runs.
        overrides: values of params.yaml by dotted name, for all runs.
        name: of the sweep; without one it is made from what the sweep consists of.
        promote: let the best run's model through the gate when all are done.
    """
    trials, name = plan(space, draws=random, seed=seed, recipe=recipe, overrides=overrides or {}, name=name)
    work = Sweep(name, trials, metric=metric, goal=goal, recipe=recipe, overrides=overrides or {})
    work.run(runs_at_once)
    result = work.result()
    summary.publish(result, work.folder)
    if promote:
        cancellation.stop_if_cancelled()
        work.promote(result)
    return result


class Sweep:
    """The runs of a sweep, what became of each, and where that is written."""

    def __init__(
        self,
        name: str,
        trials: list[Trial],
        *,
        metric: str,
        goal: str,
        recipe: str | None,
        overrides: dict[str, Any],
    ) -> None:
        self.name, self.trials, self.metric, self.goal = name, trials, metric, goal
        self.recipe, self.overrides = recipe, overrides
        self.folder = FOLDER / name
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.log = get_run_logger()
        self.said = ""

    def run(self, at_once: int) -> None:
        if at_once < 1:
            raise UserError(f"--runs-at-once {at_once}: one at least must work.")
        done = [trial for trial in self.trials if self.outcome(trial)]
        for trial in done:
            self._check(trial)
            self.log.info("%s: finished before", trial.name)
        todo = [trial for trial in self.trials if trial not in done]
        self.log.info("Sweep %s: %d runs, %d at a time", self.name, len(todo), min(at_once, max(1, len(todo))))
        tags = {"sweep": self.name}
        side_by_side.side_by_side(todo, at_once, self.command, self.folder, tags, self._ended, self._told)
        if len(self.failed) == len(self.trials):
            raise UserError(f"No run of the sweep {self.name} finished. " + " ".join(self._why(t) for t in self.trials))

    def command(self, trial: Trial) -> list[str]:
        """A run that was begun goes on in its own worktree, with its own run in MLflow."""
        begun = runs.find(trial.name) is not None
        given = [sys.executable, "-m", "flows.dpo", "--resume", trial.name]
        return [*(given if begun else trial.command(self.recipe, self.overrides)), "--unregistered"]

    def outcome(self, trial: Trial) -> dict[str, Any]:
        """What a finished run left; nothing of one that did not finish."""
        record = runs.find(trial.name)
        if record is None or record.state != runs.FINISHED:
            return {}
        return {"stages": read_json(record.folder / "stages.json"), "flow_run": record.flow_runs[-1]}

    def metrics(self, trial: Trial) -> dict[str, float]:
        return sweeps.metrics_of(self.logs(trial)) if self.outcome(trial) else {}

    def logs(self, trial: Trial) -> Path:
        return runs.runs_folder() / trial.name

    def result(self) -> dict[str, Any]:
        rows = sweeps.ranked([self._row(trial) for trial in self.trials], self.goal)
        ids = [
            read_json(row["logs"] / "run.json") for row in rows if row["logs"] and (row["logs"] / "run.json").exists()
        ]
        best = next(trial for trial in self.trials if trial.name == rows[0]["name"])
        again = [*best.command(self.recipe, self.overrides)]
        again[again.index("--name") + 1] = f"{best.name}-promoted"
        shown = [{**row, "logs": str(row["logs"] or "")} for row in rows]
        how = {
            "metric": self.metric,
            "goal": self.goal,
            "best": best.name,
            "promote": shlex.join(["python", *again[1:]]),
        }
        return {"sweep": self.name, **how, "rows": shown, "ids": ids, "failed": sorted(self.failed)}

    def promote(self, result: dict[str, Any]) -> None:
        """The best run once more, which computes nothing again, and this time through the gate."""
        name = f"{result['best']}-promoted"
        if (before := runs.find(name)) and before.state == runs.FINISHED:
            self.log.info("%s went through the gate already", name)
            return
        command = [sys.executable, *shlex.split(result["promote"])[1:]]
        if before:
            command = [sys.executable, "-m", "flows.dpo", "--resume", name]
        env = side_by_side.environment({"sweep": self.name})
        if server.embedded():  # it must know that nobody can press Resume there
            del env["PREFECT_API_URL"]
        code = child.run(command, ROOT, env, lambda line: self.log.info("%s", line))
        cancellation.stop_if_noticed()
        if code:
            raise UserError(f"The best run's model was not put before the gate: {name} ended with {code}; see above.")

    def _row(self, trial: Trial) -> dict[str, Any]:
        metrics = self.metrics(trial)
        low, high = sweeps.interval(metrics, self.metric)
        found = {"metric": metrics.get(self.metric), "low": low, "high": high}
        outcome = self.outcome(trial)
        taken = sum(state["seconds"] for state in outcome.get("stages", [])) or self.seconds.get(trial.name, 0.0)
        state = {"state": "finished" if outcome else "failed", "why": self.failed.get(trial.name, ""), "seconds": taken}
        where = {"logs": self.logs(trial) if outcome else None, "page": server.flow_page(outcome.get("flow_run"))}
        return {"name": trial.name, "values": trial.values, **found, **state, **where}

    def _ended(self, trial: Trial, code: int, seconds: float) -> None:
        self.seconds[trial.name] = seconds
        if code == 0 and self.outcome(trial):
            self._check(trial)
            value = self.metrics(trial)[self.metric]
            self.log.info("%s: finished in %.0f s, %s %.4g", trial.name, seconds, self.metric, value)
            return
        lines = (self.folder / f"{trial.name}.log").read_text(errors="replace").splitlines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        said = " ".join(lines[errors[-1] :]) if errors else "".join(lines[-1:]) or "it said nothing"
        self.failed[trial.name] = said.removeprefix("error: ")
        self.log.warning("%s", self._why(trial))

    def _why(self, trial: Trial) -> str:
        return f"{trial.name} failed: {self.failed[trial.name]} (all it said: {self.folder / trial.name}.log)"

    def _check(self, trial: Trial) -> None:
        """A metric that there is not ends the sweep with its first run, not with its last."""
        sweeps.check_metric(self.metric, self.metrics(trial), trial.name)

    def _told(self, running: Any, waiting: int) -> None:
        cancellation.stop_if_noticed()
        over = len(self.trials) - waiting - len(running)
        working: list[Running] = list(running)
        doing = ", ".join(f"{one.trial.number} {one.doing}" for one in working)
        said = f"sweep: {over}/{len(self.trials)} runs" + (f"; at work: {doing}" if doing else "")
        if said != self.said:
            self.log.info("%s", said)
        self.said = said


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flows.sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--space", action="append", default=[], metavar="KEY=VALUES", help="train.beta=0.05,0.1")
    parser.add_argument("--metric", default=METRIC, help="what is compared, as MLflow shows it")
    parser.add_argument("--goal", choices=("max", "min"), default="max", help="min where less is better")
    parser.add_argument("--runs-at-once", type=int, default=2, metavar="N")
    parser.add_argument("--random", type=int, metavar="N", help="draw so many combinations instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--recipe", help="a named overlay of params.yaml, from flows/recipes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="the same value for all runs")
    parser.add_argument("--name", help="of the sweep")
    parser.add_argument("--promote", action="store_true", help="let the best run's model through the gate")
    return parser.parse_args(given)


def run_here(given: list[str]) -> int:
    asked = arguments(given)
    values = dict(parse(text) for text in asked.space)
    overrides = dict(override(text) for text in asked.set)
    tried = {"draws": asked.random, "seed": asked.seed, "recipe": asked.recipe, "name": asked.name}
    plan(values, overrides=overrides, **tried)  # a mistake is told first
    server.start()
    shown = terminal.attach()
    how = {
        name: getattr(asked, name) for name in ("metric", "goal", "runs_at_once", "random", "seed", "recipe", "name")
    }
    try:
        result = sweep(space=values, overrides=overrides, promote=asked.promote, **how)
    finally:
        shown.end_line()
    sweeps.show(result["rows"], result["metric"], summary.lines(result))
    return 1 if result["failed"] else 0


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that what we started is ended


@as_command
def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        sys.exit(run_here(sys.argv[1:]))
    except CancelledRun as error:
        sys.exit(f"{error} The same command again goes on with what is not finished.")
    except KeyboardInterrupt:
        print("Stopped. The same command again goes on with what is not finished.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
