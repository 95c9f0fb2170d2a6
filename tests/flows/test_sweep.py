"""Sweeps: search space, order of trials, result; one sweep on a real Prefect server, with dummy stages."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cli.main import app
from flows import sweep_trials
from flows.sweep_trials import Trial, run_trials
from services.mlflow_urls import compare_link
from tasks.errors import UserError
from tasks.reports import sweep_table
from tasks.reports.summary import RunSummary
from tasks.runs.search_space import Range, combinations, parse
from tasks.system import processes
from tasks.tracking import plots
from tasks.tracking.journal import StageJournal
from tests.support.deployed import ask

Env = dict[str, str]
MARGINS = "eval/rewards/margins"  # the dummy evaluate's is train.beta


def test_a_grid_has_every_combination_once() -> None:
    space = dict(parse(text) for text in ("train.beta=0.05,0.1,0.05", "train.loss={sigmoid: 1.0},{ipo: 1.0}"))
    assert combinations(space, None, 0) == [
        {"train.beta": 0.05, "train.loss": {"sigmoid": 1.0}},
        {"train.beta": 0.05, "train.loss": {"ipo": 1.0}},
        {"train.beta": 0.1, "train.loss": {"sigmoid": 1.0}},
        {"train.beta": 0.1, "train.loss": {"ipo": 1.0}},
    ]


def test_random_draws_are_the_same_for_a_seed_and_lie_in_their_range() -> None:
    assert parse("train.beta=0.05..0.5") == ("train.beta", Range(low=0.05, high=0.5))
    space = dict([parse("train.learning_rate=log:1.0e-6..1.0e-2"), parse("train.seed=0,1")])
    drawn = combinations(space, 400, seed=3)
    assert drawn == combinations(space, 400, seed=3) != combinations(space, 400, seed=4)
    rates = [one["train.learning_rate"] for one in drawn]
    assert all(1e-6 <= rate <= 1e-2 for rate in rates)
    # Evenly over four orders of magnitude: half of them below 1e-4, give or take three standard deviations of 400.
    assert abs(sum(rate < 1e-4 for rate in rates) / len(rates) - 0.5) < 3 * math.sqrt(0.25 / len(rates))
    grid = {"train.seed": list(range(10))}
    some = combinations(grid, 4, 0)
    assert len(some) == len({one["train.seed"] for one in some}) == 4
    assert len(combinations(grid, 99, 0)) == 10


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "A sweep needs a search space"),
        (["--space", "train.beta"], "is not KEY=VALUE,VALUE"),
        (["--space", "train.beta=0.1..0.5"], "a range needs --random N"),
        (["--space", "train.beta=0.5..0.1", "--random", "2"], "the range from 0.5 to 0.1 is empty"),
        (["--space", "train.beta=0.1,{"], "is neither values nor a range"),
        (["--space", "train.bta=1"], "Unknown key `train.bta`. Did you mean `train.beta`?"),
        (["--space", "train.learning_rate='5e-7'"], "Write 5.0e-07."),
        (["--space", "train.beta=0.1", "--random", "0"], "a sweep needs at least one run"),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        app(["sweep", *arguments], standalone_mode=False)
    assert sentence in str(refusal.value)


def planned(space: Any, name: str | None = None) -> tuple[list[Trial], str]:
    return sweep_trials.plan(space, draws=None, seed=0, recipe=None, overrides={}, name=name)


def test_a_sweep_is_named_by_a_hash_of_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_trials, "FOLDER", tmp_path)
    space = {"train.learning_rate": [5e-7, 1e-6]}
    made, name = planned(space)
    assert planned(space)[1] == name
    assert planned({"train.learning_rate": [5e-7]})[1] != name
    assert [one.name for one in made] == [f"{name}-1-learning-rate-5e-07", f"{name}-2-learning-rate-1e-06"]
    assert made[0].command("demo", {"train.seed": 1})[1:] == [
        *("-m", "cli", "run", "--name", made[0].name, "--recipe", "demo"),
        *("--set", "train.seed=1", "--set", "train.learning_rate=5.0e-07"),  # and not 5e-07, which is text
    ]
    planned(space, "mine")
    with pytest.raises(UserError, match="There is another sweep named mine"):
        planned({"train.beta": [0.9]}, "mine")


def trial(number: int) -> Trial:
    return Trial(number, f"run-{number}", {})


def run_trial(script: str) -> Callable[[Trial, Callable[[str], None]], int]:
    """Execute a shell script, with the trial's number as $0, instead of `dpo run`."""
    env = {"PATH": os.environ["PATH"]}
    return lambda trial, on_line: processes.run(["sh", "-c", script, str(trial.number)], Path("/"), env, on_line)


def test_trials_run_in_parallel_up_to_the_limit() -> None:
    script = "sleep 0.3; echo 'train: 1/2 steps'; sleep 1; exit $(($0 % 2))"
    codes: dict[int, int] = {}
    states: list[tuple[list[str], int]] = []  # of the running trials, and how many wait

    def on_end(trial: Trial, code: int, seconds: float) -> None:
        codes[trial.number] = code
        assert seconds >= 1.3

    trials = [trial(number) for number in range(1, 4)]
    run_trials(trials, 2, run_trial(script), on_end, lambda running, waiting: states.append((running, waiting)))
    assert codes == {1: 1, 2: 0, 3: 1}  # a trial that fails stops no other
    assert max(len(running) for running, _ in states) == 2
    assert (["1 train 1/2", "2 train 1/2"], 1) in states
    assert states[-1] == ([], 0)


def test_no_trial_outlives_an_interrupted_sweep(tmp_path: Path) -> None:
    def interrupt(running: list[str], waiting: int) -> None:
        if len([path for path in tmp_path.iterdir() if path.read_text()]) == len(running) == 2:
            raise KeyboardInterrupt

    trials = [trial(1), trial(2), trial(3)]
    script = f"echo $$ > {tmp_path}/$0; sleep 600 & wait"
    with pytest.raises(KeyboardInterrupt):
        run_trials(trials, 2, run_trial(script), lambda *ended: None, interrupt)
    started = sorted(tmp_path.iterdir())
    assert [path.name for path in started] == ["1", "2"]
    assert not any(psutil.pid_exists(int(path.read_text())) for path in started)


def test_metrics_come_from_the_journals_and_an_unknown_one_is_an_error(tmp_path: Path) -> None:
    StageJournal(tmp_path, "train").summary({"loss": 0.5})
    bounds = {"eval/intervals/rewards/margins/low": 1.0, "eval/intervals/rewards/margins/high": 2.0}
    StageJournal(tmp_path, "flow").summary({MARGINS: 1.5, **bounds})
    metrics = RunSummary("one", tmp_path, tmp_path).metrics
    assert (metrics["loss"], metrics[MARGINS]) == (0.5, 1.5)
    assert sweep_table.interval(metrics, MARGINS) == (1.0, 2.0)
    assert sweep_table.interval(metrics, "loss") is None
    win_rate = {"eval/win_rate/rate": 0.7, "eval/win_rate/low": 0.6, "eval/win_rate/high": 0.8}
    assert sweep_table.interval(win_rate, "eval/win_rate/rate") == (0.6, 0.8)  # beside the rate
    with pytest.raises(UserError, match=f"The run one has no metric 'nope'. There are: {MARGINS}, loss"):
        sweep_table.check_metric("nope", metrics, "one")


def row(name: str, metric: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    found = {"metric": metric, "low": low, "high": high, "seconds": 1.0, "state": "finished" if metric else "failed"}
    return {"name": name, "values": {"train.beta": metric or 0.5, "train.loss": {"ipo": 1.0}}, **found}


def test_the_best_run_is_first_and_overlapping_intervals_are_named(tmp_path: Path) -> None:
    rows = [row("a", 0.7, 0.6, 0.8), row("b", None), row("c", 0.9, 0.8, 1.0), row("d", 0.5, 0.4, 0.6)]
    assert [one["name"] for one in sweep_table.ranked(rows, "max")] == ["c", "a", "d", "b"]
    assert [one["name"] for one in sweep_table.ranked(rows, "min")] == ["d", "a", "c", "b"]
    assert sweep_table.not_told_apart(sweep_table.ranked(rows, "max")) == ["a"]  # 0.6 to 0.8 touches 0.8 to 1.0
    table, figure = sweep_table.write(sweep_table.ranked(rows, "max"), MARGINS, tmp_path)
    assert table.read_text().splitlines()[1].startswith("c,0.9,{'ipo': 1.0},0.9,0.8,1.0,")
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_an_axis_is_logarithmic_over_orders_of_magnitude_and_categorical_for_text() -> None:
    assert plots._scale([1e-6, 1e-4, 1e-5])[0] == pytest.approx([0.0, 1.0, 0.5])
    assert plots._scale([0.1, 0.3, 0.2])[0] == pytest.approx([0.0, 1.0, 0.5])
    assert plots._scale([{"ipo": 1}, {"sft": 1}])[0] == [0.0, 1.0]
    assert plots._scale([2, 2]) == ([0.5, 0.5], [(0.5, "2")])


def test_the_compare_link_is_what_mlflow_reads() -> None:
    ids = [{"run_id": name, "experiment_id": "1", "tracking_uri": "sqlite:///x"} for name in ("a", "b")]
    assert compare_link(ids) == (
        "http://127.0.0.1:5000/#/compare-runs?runs=%5B%22a%22%2C%22b%22%5D&experiments=%5B%221%22%5D"
        "&workflowType=machine_learning"
    )
    assert compare_link([]) is None


def sweep(root: Path, env: Env, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", "sweep", "--space", "train.beta=0.3,0.5", "--runs-at-once", "2"]
    return subprocess.run([*command, *arguments], cwd=root, env=env, capture_output=True, text=True, timeout=900)


def ran(root: Path, stage: str) -> int:
    return (root / ".scratch" / "ran").read_text().split().count(stage)


def artifact(env: Env, key: str) -> Any:
    newest = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 1}
    return ask(env, "artifacts/filter", newest)[0]["data"]


@pytest.mark.slow
def test_a_sweep_computes_the_reference_once_reports_failures_and_continues(dummy_repo: Path, prefect_api: Env) -> None:
    (dummy_repo / "site.yaml").write_text("exp_name: site\n")
    prefect_api = {**prefect_api, "DPO_CLUSTER": str(dummy_repo / "site.yaml")}
    env = {**prefect_api, "DUMMY": "train:user>0.4"}
    first = sweep(dummy_repo, env, "--metric", MARGINS)
    assert first.returncode == 1, first.stderr
    assert {stage: ran(dummy_repo, stage) for stage in ("source", "prepare", "reference", "train", "promote")} == {
        "source": 1,
        "prepare": 1,
        "reference": 1,  # though two began together
        "train": 2,
        "promote": 0,
    }
    name = re.search(r"best +(sweep-\w+-1-beta-0\.3), eval/rewards/margins 0\.3", first.stdout)
    assert name, first.stdout
    assert re.search(r"failed +sweep-\w+-2-beta-0\.5: pairs\.jsonl line 3 is broken\. Mend it\.", first.stdout)
    assert "the same command runs what failed" in first.stdout
    result = artifact(prefect_api, "sweep-result")
    assert len(re.findall(r"\[Prefect\]\(http://127\.0\.0\.1:\d+/runs/flow-run/[\w-]+\)", result)) == 1
    assert artifact(prefect_api, "sweep-figure").startswith("data:image/png;base64,")
    assert "/#/compare-runs?runs=%5B%22" in artifact(prefect_api, "sweep-compare")

    again = sweep(dummy_repo, prefect_api, "--metric", MARGINS, "--promote")
    assert again.returncode == 0, again.stderr + again.stdout
    assert again.stdout.count("finished before") == 1
    assert re.search(r"best +sweep-\w+-2-beta-0\.5, ", again.stdout)
    assert (ran(dummy_repo, "train"), ran(dummy_repo, "promote")) == (3, 1)  # the failed one, and then the best
    assert (ran(dummy_repo, "reference"), ran(dummy_repo, "evaluate")) == (1, 2)
    branches = subprocess.run(["git", "branch", "--list"], cwd=dummy_repo, capture_output=True, text=True).stdout
    assert len(re.findall(r"runs/sweep-\w+-\d-beta", branches)) == 3
    check_mlflow(dummy_repo, name[1].rsplit("-1-", 1)[0])


def check_mlflow(root: Path, name: str) -> None:
    """The sweep has one run of its own under its own name, though it was started twice, beside the runs it is about."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/.mlflow/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'site'")  # all that came from DPO_CLUSTER's file
    found = client.search_runs([experiment.experiment_id], f"tags.sweep = '{name}'")
    (own,) = [run for run in found if run.data.tags.get("kind") == "sweep"]
    assert (own.info.run_name, own.info.status) == (name, "FINISHED")
    assert own.data.tags["best"] == f"{name}-2-beta-0.5"
    assert own.data.metrics[MARGINS] == 0.5
    kept = {"sweep.csv", "sweep.png", "sweep.md", "configuration.yaml"}
    assert kept == {file.path for file in client.list_artifacts(own.info.run_id)} - {"params.json"}
    parents = [run for run in found if "mlflow.parentRunId" not in run.data.tags and run.info.run_id != own.info.run_id]
    assert {run.data.params["train.beta"] for run in parents} == {"0.3", "0.5"}
    runs = root / ".scratch" / "runs"
    assert (runs / name / "run.json").exists()
    assert not [path.name for path in runs.iterdir() if path.name.startswith("dvc-") or path.name == "by-hand.json"]


@pytest.mark.slow
def test_dvc_experiments_run_only_changed_stages(dummy_repo: Path) -> None:
    """`dvc exp run -S`: in the workspace, then in a folder of DVC's; each computes what its params change."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "DPO_HOME": str(dummy_repo)}

    def dvc(*arguments: str) -> str:
        command = [sys.executable, "-m", "dvc", *arguments]
        done = subprocess.run(command, cwd=dummy_repo, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (dummy_repo / ".scratch").mkdir(exist_ok=True)
    dvc("exp", "run", "-n", "higher", "-S", "train.beta=0.2")
    assert yaml.safe_load((dummy_repo / "params.yaml").read_text())["train"]["beta"] == 0.2
    assert "beta: 0.2" in (dummy_repo / "dvc.lock").read_text()
    dvc("exp", "run", "--temp", "-n", "aside", "-S", "train.beta=0.3")
    assert yaml.safe_load((dummy_repo / "params.yaml").read_text())["train"]["beta"] == 0.2  # and not ours
    assert (ran(dummy_repo, "reference"), ran(dummy_repo, "train")) == (1, 2)
    shown = dvc("exp", "show", "--csv", "--no-pager")
    assert re.search(r"higher,.*0\.2", shown)
    assert re.search(r"aside,.*0\.3", shown)
