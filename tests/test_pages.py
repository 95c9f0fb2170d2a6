"""MLflow's pages in real Chromium: two runs beside each other, useful at once."""

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from mlflow import MlflowClient

from tasks.files import write_json
from tasks.params import load_cluster, load_params
from tasks.tracking import journal
from tests.browser import Page, browser, chromium
from tests.workspaces import PROJECT, make_workspace

pytestmark = pytest.mark.slow
NAMES = ("calm-otter", "brave-heron")
BETAS = {"calm-otter": 0.1, "brave-heron": 0.4}
EVALUATED = {"rewards/accuracies": 0.875, "kl/answers": 0.5, "win_rate": {"rate": 0.75, "wins": 3}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, mlflow_server: str) -> dict[str, str]:
    """Two runs that differ in beta, told as the flow tells them, their training as figures alone; ids by name."""
    chromium()
    root = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PROJECT))
        for name in NAMES:
            patch.chdir(make_workspace(root / name, Path("unused"), **{"train.beta": BETAS[name]}))
            patch.setenv("DPO_RUN", name)
            _run(name, mlflow_server)
    return {name: json.loads((root / name / f".scratch/runs/{name}/run.json").read_text())["run_id"] for name in NAMES}


def _run(name: str, server: str) -> None:
    params, cluster = load_params(), load_cluster().model_copy(update={"tracking_uri": server, "exp_name": "pages"})
    for folder, content in (("raw", {"source": "pairs.jsonl", "rows": 120}), ("base", {"model": "tiny"})):
        write_json(Path("data") / folder / "manifest.json", {**content, "sha256": folder * 8})
    write_json(Path("data/reference/manifest.json"), {"of": name})
    folder = journal.open_run(params, cluster, root=PROJECT)
    journal.begin(folder, {"recipe": "none"})
    with journal.tracked("train", params, cluster) as run:
        for step in range(1, 11):
            run.metrics(step, {"loss": BETAS[name] / step, "rewards/margins": step * BETAS[name]})
    write_json(Path("data/metrics/train.json"), {"loss": BETAS[name] / 10, "eval/loss": 9.0})
    write_json(Path("data/metrics/evaluate.json"), {**EVALUATED, "loss": BETAS[name] / 8})
    states = {"source": "cached", "train": "ran", "evaluate": "cached"}
    journal.finish(folder, root=Path(), states=states, status="FINISHED")


@pytest.fixture(scope="module")
def page(runs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as made:
        yield made


def parents_and_children(server: str) -> tuple[str, dict[str, str]]:
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("pages").experiment_id
    found = client.search_runs([experiment], "tags.stage = 'train'")
    return experiment, {run.info.run_name: run.info.run_id for run in found}


def test_a_parent_carries_what_a_comparison_needs(runs, mlflow_server):
    run = MlflowClient(mlflow_server).get_run(runs["brave-heron"])
    commit = journal.commit(PROJECT)
    assert len(commit) == 40
    expected = {
        "data": "pairs.jsonl",
        "data_sha256": "raw" * 8,
        "base": "tiny",
        "base_sha256": "base" * 8,
        "recipe": "none",
        "git_commit": commit[:12],
        "mlflow.source.git.commit": commit,
        "stage.source": "cached",
        "stage.train": "ran",
        "stage.evaluate": "cached",
    }
    assert expected.items() <= run.data.tags.items()
    assert len(run.data.tags["reference"]) == 24
    assert run.data.params["train.beta"] == "0.4"
    assert run.data.params["train.adapter.rank"] == "4"
    # The last training value, and the evaluation's own word on the held-out loss: 0.4 / 10 and 0.4 / 8.
    assert (run.data.metrics["loss"], run.data.metrics["eval/loss"]) == (0.04, 0.05)
    assert run.data.metrics["eval/win_rate/rate"] == 0.75
    assert [data.dataset.name for data in run.inputs.dataset_inputs] == ["raw"]
    assert json.loads(run.inputs.dataset_inputs[0].dataset.profile) == {"num_rows": 120}


def test_the_compare_page_shows_both_runs_and_what_differs(runs, page, mlflow_server, tmp_path):
    experiment, _ = parents_and_children(mlflow_server)
    asked = f"runs={quote(json.dumps(list(runs.values())))}&experiments={quote(json.dumps([experiment]))}"
    page.open(f"{mlflow_server}/#/compare-runs?{asked}", height=3000)
    page.shows(*NAMES, "train.beta", "train.learning_rate", "eval/loss", "eval/rewards/accuracies", "Tags")
    page.ask("document.querySelectorAll('button[role=switch]').forEach(button => button.click())")
    for same_in_both in ("train.learning_rate", "eval/rewards/accuracies"):
        page.until(f"document.body.innerText.includes({json.dumps(same_in_both)})", False)
    shown = page.shows("Parameters\n", "train.beta", "Metrics\n", "eval/loss", "Artifacts")
    page.picture(tmp_path / "compare.png")
    parameters, metrics = shown[shown.index("Parameters\n") :].split("Metrics\n", 1)
    assert {"train.beta", "0.1", "0.4"} <= set(parameters.split())
    assert {"eval/loss", "0.013", "0.05"} <= set(metrics.split("Artifacts")[0].split())  # 0.1 / 8, rounded, and 0.4 / 8
    assert "mlflow.journal" not in shown


def test_curves_of_two_runs_overlay_and_say_whose_they_are(runs, page, mlflow_server, tmp_path):
    experiment, children = parents_and_children(mlflow_server)
    assert set(children) == {f"train of {name}" for name in NAMES}
    asked = f"runs={quote(json.dumps(list(children.values())))}&experiments={quote(json.dumps([experiment]))}"
    page.open(f"{mlflow_server}/#/metric?{asked}&metric=%22loss%22&plot_metric_keys=%5B%22loss%22%5D&x_axis=step")
    page.shows(*(f"train of {name} (loss)" for name in NAMES), "0.04 (step=10)", "0.01 (step=10)", "Max")
    page.until("document.querySelectorAll('.js-plotly-plot').length", 1)  # two curves in one chart
    page.until("document.querySelector('.xtitle')?.textContent", "Step")
    page.picture(tmp_path / "overlay.png")


def test_the_list_of_runs_has_useful_columns_at_once(runs, page, mlflow_server, tmp_path):
    experiment, _ = parents_and_children(mlflow_server)
    asked = "workflowType=machine_learning&viewStateShareKey=dpo"  # as `make up` prints it
    page.open(f"{mlflow_server}/#/experiments/{experiment}/runs?{asked}", width=2400)
    page.shows(*NAMES, "eval/loss", "train.beta", "recipe", "0.0125", "A row is a run of the pipeline")
    page.picture(tmp_path / "runs.png")
    assert asked in (PROJECT / "flows" / "up.py").read_text()
