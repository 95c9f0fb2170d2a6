"""Tracking never hurts training: a real MLflow server behind a proxy that is gone, dies, is slow, fails, loses answers.

A stage that only writes figures stands for training here (runs/test_resume.py has a real one). Whatever the server
did, the stage ends in bounded time, and afterwards MLflow has one parent, one child and each step once.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import load_params
from tasks.tracking import journal, journal_reader, mlflow_client, pipeline_run, uploader
from tests.support.proxy import Proxy, proxied
from tests.support.workspaces import PROJECT, make_workspace, wait_for

pytestmark = pytest.mark.slow
STEPS = {step: 1.0 / step for step in range(1, 31)}


@pytest.fixture(scope="module")
def workspace_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("outage") / "workspace", Path("unused"))


@pytest.fixture
def workspace(workspace_once: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workspace_once)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    for name, value in mlflow_client.LIMITS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    return workspace_once


@pytest.fixture
def proxy(mlflow_server: str) -> Iterator[Proxy]:
    with proxied(mlflow_server) as proxy:
        yield proxy


def at(proxy: Proxy) -> Cluster:
    return load_cluster().model_copy(update={"tracking_uri": proxy.address})


def stage(
    monkeypatch: pytest.MonkeyPatch, name: str, cluster: Cluster, halfway: Callable[[], object] = lambda: None
) -> float:
    """A stage of that run that logs STEPS; how long it took."""
    monkeypatch.setenv("DPO_RUN", name)
    began = time.monotonic()
    training = journal.Journal(Path(f".scratch/train/{name}/metrics.jsonl"))
    training.path.parent.mkdir(parents=True)
    with pipeline_run.record_stage("train", load_params(), cluster) as run:
        with run.including(training.path.parent):
            for step, value in STEPS.items():
                training.metrics(step, {"loss": value, "rewards/margins": 2 * value})
                if step == 15:
                    halfway()
        run.summary({"loss": STEPS[30]})
    return time.monotonic() - began


def recorded(server: str, name: str) -> dict[str, Any]:
    """What MLflow has of a run: its parent and the child `train`, exactly one of each."""
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("dpo").experiment_id
    (parent,) = client.search_runs([experiment], f"tags.pipeline_run = '{name}'")
    (child,) = client.search_runs([experiment], f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    history = client.get_metric_history(child.info.run_id, "loss")
    margins = client.get_metric_history(child.info.run_id, "rewards/margins")
    above = client.get_metric_history(parent.info.run_id, "loss")
    return {
        "parent": parent,
        "child": child,
        "loss": {point.step: point.value for point in history},
        "points": len(history),
        "margins": len(margins),
        "above": {point.step: point.value for point in above},
        "points_above": len(above),
    }


def whole(server: str, name: str) -> None:
    """Each step once on both runs, with five digits on the parent, both runs ended."""
    run = recorded(server, name)
    assert run["loss"] == STEPS
    assert (run["points"], run["margins"], run["points_above"]) == (30, 30, 30)
    assert run["above"] == {step: float(f"{value:.5g}") for step, value in STEPS.items()}
    assert {run["parent"].info.status, run["child"].info.status} == {"FINISHED"}
    assert run["parent"].data.tags["stage.train"] == "ran"
    assert run["parent"].data.metrics["loss"] == 0.033333
    assert run["parent"].data.params["train.beta"] == "0.1"
    assert run["parent"].info.start_time <= run["child"].info.start_time <= run["child"].info.end_time


def test_unreachable_at_start_then_make_sync(workspace, proxy, mlflow_server, monkeypatch, capsys):
    proxy.stop()  # a closed port
    took = stage(monkeypatch, "gone", at(proxy))
    assert took < 30
    errors = capsys.readouterr().err
    assert "MLflow could not be reached; the metrics of train are kept in" in errors
    assert "The next run or `dpo sync` sends the rest. Reason: " in errors
    assert not uploader.sync()
    assert "error: MLflow still refuses gone: " in capsys.readouterr().out
    proxy.start()
    assert uploader.sync()
    assert capsys.readouterr().out == "sent the metrics of 1 run\n"
    whole(mlflow_server, "gone")
    assert uploader.sync()
    assert capsys.readouterr().out == "sent the metrics of 0 runs\n"


@pytest.mark.exhaustive  # the test before is down until the end
def test_dying_in_the_middle_and_back_before_the_end(workspace, proxy, mlflow_server, monkeypatch, capsys):
    proxy.dies_after = 12  # in the middle of the run's beginning, or of its figures
    folder = workspace / ".scratch/runs/dies"

    def revive() -> None:
        wait_for(lambda: (folder / mlflow_client.ERROR).exists(), 60)
        assert proxy.server is None
        proxy.dies_after = None
        proxy.start()
        wait_for(lambda: not journal_reader.unsent(folder), 60)

    stage(monkeypatch, "dies", at(proxy), halfway=revive)
    assert "warning" not in capsys.readouterr().err  # it was back in time, and nobody had to do anything
    whole(mlflow_server, "dies")


def test_failing_with_500_then_the_next_run_sends_both(workspace, proxy, mlflow_server, monkeypatch, capsys):
    proxy.mode = "error"
    assert stage(monkeypatch, "errs", at(proxy)) < 30
    assert "MLflow could not be reached" in capsys.readouterr().err
    proxy.mode = "good"
    stage(monkeypatch, "after", at(proxy))
    whole(mlflow_server, "after")
    # As a flow ends: otherwise its uploader waits for ten seconds whether another stage starts.
    journal.StageJournal(workspace / ".scratch/runs/after", journal.FLOW).write("close")
    wait_for(lambda: not journal_reader.unsent(workspace / ".scratch/runs/errs"), 60)  # by the uploader of the next run
    whole(mlflow_server, "errs")


@pytest.mark.exhaustive  # the tests around it meet servers that do not answer
def test_slow_is_waited_for_once_and_not_by_every_stage(workspace, proxy, mlflow_server, monkeypatch, capsys):
    monkeypatch.setattr(pipeline_run, "PATIENCE_SECONDS", 2.5)
    monkeypatch.setattr(pipeline_run, "LATER_SECONDS", 0.5)
    proxy.mode, proxy.delay = "slow", 0.25
    assert stage(monkeypatch, "slow", at(proxy)) < 2.5 + 3
    assert "MLflow is slow; the metrics of train are still being sent" in capsys.readouterr().err
    began = time.monotonic()
    folder = workspace / ".scratch/runs/slow"
    pipeline_run.wait_until_sent(journal.StageJournal(folder, "train"), pipeline_run.start_uploader(folder))
    assert time.monotonic() - began < 0.5 + 1
    wait_for(lambda: not journal_reader.unsent(folder), 60)  # sent by the process that stayed
    whole(mlflow_server, "slow")
    assert proxy.requests < 40  # 30 steps with two figures each: they travel together


def test_lost_answers_and_a_uploader_that_forgets_send_nothing_twice(workspace, proxy, mlflow_server, monkeypatch):
    folder = workspace / ".scratch/runs/lost"
    proxy.mode = "lost"
    stage(monkeypatch, "lost", at(proxy))
    assert not (folder / "run.json").exists()
    proxy.mode = "good"
    assert uploader.send_all(folder.parent) == (1, {})
    before = recorded(mlflow_server, "lost")
    whole(mlflow_server, "lost")
    # It died after the last call and before it noted anything: neither ids nor offsets.
    for name in ("run.json", "train.run.json", "train.sent.json"):
        (folder / name).unlink()
    assert uploader.send_all(folder.parent) == (1, {})
    whole(mlflow_server, "lost")
    after = recorded(mlflow_server, "lost")
    assert [after[run].info.run_id for run in ("parent", "child")] == [
        before[run].info.run_id for run in ("parent", "child")
    ]


def test_what_the_server_refuses_for_good_holds_nothing_up(workspace, proxy, mlflow_server, monkeypatch, capsys):
    monkeypatch.setenv("DPO_RUN", "refused")
    with pipeline_run.record_stage("train", load_params(), at(proxy)) as run:
        run.metrics(1, {"loss (held-out)": 0.5})  # a name that MLflow refuses, and that is mended
        run.params({"x" * 300: 1})  # one that is not: too long
        run.metrics(2, {"loss (held-out)": 0.25})
    assert "warning" not in capsys.readouterr().err
    child = recorded(mlflow_server, "refused")["child"]
    history = MlflowClient(mlflow_server).get_metric_history(child.info.run_id, "loss _held-out_")
    assert [point.step for point in history] == [1, 2]
    assert "left out, because MLflow refuses it" in (workspace / ".scratch/runs/refused/upload.log").read_text()


def test_a_journal_with_half_a_line_goes_on_behind_it(workspace, proxy, mlflow_server, monkeypatch):
    monkeypatch.setenv("DPO_RUN", "half")
    folder = pipeline_run.open_run(load_params(), at(proxy))
    first = journal.StageJournal(folder, "train")
    first.metrics(1, {"loss": 1.0})
    with first.path.open("a") as file:
        file.write('{"kind": "metr')  # and was killed
    again = journal.StageJournal(folder, "train")
    again.metrics(1, {"loss": 1.0})  # known
    again.metrics(2, {"loss": 0.5})
    assert uploader.send_all(folder.parent) == (1, {})
    assert recorded(mlflow_server, "half")["loss"] == {1: 1.0, 2: 0.5}
