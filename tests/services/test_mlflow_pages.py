"""MLflow's pages in real Chromium, for somebody with the reader's login of our server: runs, models, feedback."""

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from services.mlflow_urls import compare_link, mlflow_link, runs_link
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.feedback import traces
from tasks.system.files import write_json
from tasks.tracking import pipeline_run, results
from tasks.train.progress import write_table
from tests.support.browser import Page, browser, needed
from tests.support.feedback import answer, feedback, written
from tests.support.mlflow_logins import PASSWORDS, VARIABLES, mlflow_with_logins
from tests.support.workspaces import PROJECT, make_workspace

pytestmark = [pytest.mark.slow, needed]
NAMES = ("calm-otter", "brave-heron")
TRAINED = "brave-heron"
BETAS = {"calm-otter": 0.1, "brave-heron": 0.4}
EVALUATED = {"rewards/accuracies": 0.875, "kl/answers": 0.5, "win_rate": {"rate": 0.75, "wins": 3}}


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Iterator[str]:
    """Ours with logins. Clients of the tests are readers; what logs and collects takes the login that it needs."""
    reader = {"MLFLOW_TRACKING_USERNAME": "reader", "MLFLOW_TRACKING_PASSWORD": PASSWORDS["reader"]}
    with (
        pytest.MonkeyPatch.context() as patch,
        mlflow_with_logins(tmp_path_factory.mktemp("mlflow-logins"), mlflow_store) as address,
    ):
        for name, value in {**VARIABLES, **reader}.items():
            patch.setenv(name, value)
        yield address


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, mlflow_server: str) -> dict[str, str]:
    """Two runs with different beta, logged as the flow logs them; ids by name.

    The first trains, as figures alone; the second finds its training cached.
    """
    root = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
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
    folder = pipeline_run.open_run(params, cluster, root=PROJECT)
    pipeline_run.begin(folder, {"recipe": "none"})
    steps = {step: {"loss": BETAS[name] / step, "rewards/margins": step * BETAS[name]} for step in range(1, 11)}
    steps[5]["eval/loss"] = 1 / 3
    if name == TRAINED:
        with pipeline_run.record_stage("train", params, cluster) as run:
            for step, values in steps.items():
                run.metrics(step, values)
            run.summary(steps[10])
    write_json(Path("data/metrics/evaluate.json"), {**EVALUATED, "loss": BETAS[name] / 8})
    write_table(Path("data/metrics/train.csv"), steps)
    states = {"source": "cached", "train": "ran" if name == TRAINED else "cached", "evaluate": "cached"}
    pipeline_run.finish(folder, root=Path(), states=states, status="FINISHED")


@pytest.fixture(scope="module")
def page(runs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    login = base64.b64encode(f"reader:{PASSWORDS['reader']}".encode()).decode()
    with browser(tmp_path_factory.mktemp("browser") / "profile") as made:
        made.call("Network.enable")
        made.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {login}"})
        yield made


def experiment(server: str) -> str:
    return str(MlflowClient(server).get_experiment_by_name("pages").experiment_id)


def test_a_parent_run_has_the_values_that_a_comparison_needs(runs, mlflow_server):
    run = MlflowClient(mlflow_server).get_run(runs["brave-heron"])
    commit = results.git_output(PROJECT, "rev-parse", "HEAD")
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


def test_the_compare_page_shows_both_runs_and_their_differences(runs, page, mlflow_server, tmp_path):
    ids = {"experiment_id": experiment(mlflow_server), "tracking_uri": mlflow_server}
    page.open(compare_link([{**ids, "run_id": run_id} for run_id in runs.values()]), height=3000)
    page.shows(*NAMES, "train.beta", "train.learning_rate", "eval/loss", "eval/rewards/accuracies", "Tags")
    page.evaluate("document.querySelectorAll('button[role=switch]').forEach(button => button.click())")
    for same_in_both in ("train.learning_rate", "eval/rewards/accuracies"):
        page.until(f"document.body.innerText.includes({json.dumps(same_in_both)})", False)
    shown = page.shows("Parameters\n", "train.beta", "Metrics\n", "eval/loss", "Artifacts")
    page.picture(tmp_path / "compare.png")
    parameters, metrics = shown[shown.index("Parameters\n") :].split("Metrics\n", 1)
    assert {"train.beta", "0.1", "0.4"} <= set(parameters.split())
    assert {"eval/loss", "0.013", "0.05"} <= set(metrics.split("Artifacts")[0].split())  # 0.1 / 8, rounded, and 0.4 / 8
    assert "mlflow.journal" not in shown


@pytest.mark.parametrize("name", NAMES)
def test_a_parent_has_each_point_of_its_curves_once(name, runs, mlflow_server):
    client = MlflowClient(mlflow_server)
    points = {
        metric: client.get_metric_history(runs[name], metric) for metric in ("loss", "eval/loss", "eval/kl/answers")
    }
    curves = {metric: [(point.step, point.value) for point in history] for metric, history in points.items()}
    assert curves["loss"] == [(step, float(f"{BETAS[name] / step:.5g}")) for step in range(1, 11)]
    assert curves["eval/loss"] == [(5, 0.33333), (10, BETAS[name] / 8)]  # the evaluation describes the last step
    assert curves["eval/kl/answers"] == [(10, 0.5)]


def test_one_click_in_the_list_of_runs_overlays_their_curves(runs, page, mlflow_server, tmp_path):
    page.open(runs_link(mlflow_server, experiment(mlflow_server)), width=2400)
    page.shows(*NAMES, "eval/loss", "train.beta", "recipe", "0.0125", "A row is a run of the pipeline")
    page.picture(tmp_path / "runs.png")
    page.until("!!document.querySelector('input[value=CHART]')", True)
    page.evaluate("document.querySelector('input[value=CHART]').click()")
    page.shows("training curves", "loss vs eval/loss", *(f"{name} (loss)" for name in NAMES))
    first = "document.querySelector('.js-plotly-plot')"
    page.until(f"{first}?.querySelectorAll('.scatterlayer .trace .js-line').length >= 4", True)  # both losses of both
    page.until(f"{first}?.querySelector('.xtitle')?.textContent", "Step")
    page.picture(tmp_path / "overlay.png")
    assert "PERMISSION_DENIED" not in page.text()


def test_a_run_link_opens_the_pages_of_model_training(runs, page, mlflow_server):
    ids = {"experiment_id": experiment(mlflow_server), "run_id": runs[TRAINED], "tracking_uri": mlflow_server}
    page.open(mlflow_link(ids))
    shown = page.shows(TRAINED, "Model metrics", "Model registry")
    assert "Prompts" not in shown  # of the pages for agents


def test_the_pages_of_a_model_show_its_versions(runs, page, mlflow_server, monkeypatch):
    for name, value in (("USERNAME", "writer"), ("PASSWORD", PASSWORDS["writer"])):
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
    client = MlflowClient(mlflow_server)
    client.create_registered_model("otter", description="A model of ours")
    source = f"{client.get_run(runs[TRAINED]).info.artifact_uri}/model"
    client.create_model_version("otter", source, run_id=runs[TRAINED], tags={"run": TRAINED})
    client.set_registered_model_alias("otter", "champion", "1")
    page.open(f"{mlflow_server}/#/models")
    page.shows("otter", "champion")
    page.open(f"{mlflow_server}/#/models/otter")
    page.shows("A model of ours", "Version 1", "champion")
    page.open(f"{mlflow_server}/#/models/otter/versions/1")
    assert "PERMISSION_DENIED" not in page.shows("Source Run", TRAINED)


def test_the_page_of_traces_shows_an_answer_and_its_feedback(page, mlflow_server, tmp_path):
    one = answer(model="otter")
    journal = written(tmp_path / "journal", one, feedback(one))
    assert traces.send(journal.folder, load_cluster().model_copy(update={"tracking_uri": mlflow_server})) == 2
    place = MlflowClient(mlflow_server).get_experiment_by_name(traces.experiment_name("otter")).experiment_id
    page.open(f"{mlflow_server}/#/experiments/{place}/traces?startTimeLabel=ALL", width=2400)
    assert "PERMISSION_DENIED" not in page.shows("Wie heißt Du?", "Ich heiße Bot.", "thumb")
