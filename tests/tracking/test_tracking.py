"""Tracking on a real MLflow store: parent and children, each step once; test_outage.py has a store that is gone."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.system.lock import file_lock
from tasks.tracking import uploader
from tasks.tracking.journal import StageJournal, flatten
from tasks.tracking.journal_reader import read_journal
from tasks.tracking.pipeline_run import record_stage, run_name
from tests.support.workspaces import PROJECT, make_workspace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory, mlflow_store: Path) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("tracking") / "workspace", Path("unused"))
    shutil.copytree(mlflow_store, workspace / ".mlflow")
    return workspace


@pytest.fixture
def workspace(store, monkeypatch) -> Path:
    monkeypatch.chdir(store)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    return store


def client(workspace: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{workspace}/.mlflow/mlflow.db")


def ids(workspace: Path, key: str) -> tuple[str, str]:
    folder = workspace / ".scratch" / "runs" / key
    return tuple(json.loads((folder / name).read_text())["run_id"] for name in ("run.json", "train.run.json"))


def test_a_stage_becomes_a_child_of_its_pipeline_run(workspace, monkeypatch):
    monkeypatch.setenv("DPO_RUN", "first")
    Path("figure.png").write_bytes(b"png")
    with record_stage("train", load_params(), load_cluster()) as run:
        run.metrics(1, {"loss": 0.5})
        run.metrics(2, {"loss": 0.25})
        run.metrics(2, {"loss": 9.0})  # a repeated step
        run.summary({"rewards/accuracies": 0.9})
        run.params({"long": "x" * 9000})
        run.dataset("train", digest="abc", source="pairs.jsonl")
        run.artifact(Path("figure.png"))
    parent_id, child_id = ids(workspace, "first")
    parent, child = (client(workspace).get_run(run_id) for run_id in (parent_id, child_id))
    assert child.data.tags["mlflow.parentRunId"] == parent_id
    assert parent.info.status == child.info.status == "FINISHED"
    assert parent.info.run_name == "first"
    assert parent.data.tags["stage.train"] == "ran"
    assert parent.data.params["train.beta"] == "0.1"
    recorded = yaml.safe_load(Path(client(workspace).download_artifacts(parent_id, "configuration.yaml")).read_text())
    assert recorded["cluster"] == load_cluster().model_dump()
    assert recorded["origins"]["actor_train.save_steps"] == "infra/cluster.yaml"
    assert child.data.params["adapter.rank"] == "4"
    assert child.data.params["long"] == "x" * 6000  # as much as MLflow takes
    assert parent.data.metrics["rewards/accuracies"] == 0.9
    history = client(workspace).get_metric_history(child_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.25)]
    assert [data.dataset.name for data in child.inputs.dataset_inputs] == ["train"]
    assert [file.path for file in client(workspace).list_artifacts(child_id)] == ["figure.png"]


def test_a_stage_that_fails_is_failed_and_its_repetition_goes_on(workspace, monkeypatch):
    monkeypatch.setenv("DPO_RUN", "second")

    def fail() -> None:
        with record_stage("train", load_params(), load_cluster()) as run:
            run.metrics(1, {"loss": 0.5})
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    parent_id, child_id = ids(workspace, "second")
    assert client(workspace).get_run(parent_id).info.status == "FAILED"
    with record_stage("train", load_params(), load_cluster()) as run:
        run.metrics(1, {"loss": 0.5})
        run.metrics(2, {"loss": 0.4})
    assert ids(workspace, "second") == (parent_id, child_id)
    assert client(workspace).get_run(child_id).info.status == "FINISHED"
    assert [metric.step for metric in client(workspace).get_metric_history(child_id, "loss")] == [1, 2]


def test_a_killed_stage_is_marked_by_the_process_that_outlives_it(workspace):
    code = (
        "import os, time\nfrom tasks.config.cluster import load_cluster\nfrom tasks.config.params import load_params\n"
        "from tasks.tracking.pipeline_run import record_stage\n"
        "with record_stage('train', load_params(), load_cluster()) as run:\n"
        "    run.metrics(1, {'loss': 0.5})\n    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], env={**os.environ, "DPO_RUN": "third"}, check=False)
    assert killed.returncode == -9
    for _ in range(600):
        if (workspace / ".scratch/runs/third/train.run.json").exists():
            parent_id, child_id = ids(workspace, "third")
            if client(workspace).get_run(child_id).info.status == "KILLED":
                break
        time.sleep(0.1)
    assert client(workspace).get_run(parent_id).info.status == "KILLED"


def test_a_stage_that_was_killed_with_its_uploader_is_marked_by_the_next_sync(workspace):
    """As a full disk does, where neither can write how it ended."""
    code = (
        "import os, time, psutil\nfrom tasks.config.cluster import load_cluster\n"
        "from tasks.config.params import load_params\n"
        "from tasks.tracking.journal_reader import unsent\nfrom tasks.tracking.pipeline_run import record_stage\n"
        "with record_stage('train', load_params(), load_cluster()) as run:\n"
        "    run.metrics(1, {'loss': 0.5})\n"
        "    while unsent(run.folder):\n        time.sleep(0.1)\n"
        "    for child in psutil.Process().children(recursive=True):\n        child.kill()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], env={**os.environ, "DPO_RUN": "both"}, check=False)
    assert killed.returncode == -9
    parent_id, child_id = ids(workspace, "both")
    assert client(workspace).get_run(child_id).info.status == "RUNNING"
    with ExitStack() as dying:  # the kernel frees the lock of a killed uploader when the process is gone
        dying.enter_context(file_lock(workspace / ".scratch/runs/both/upload.lock"))
        threading.Timer(1.0, dying.pop_all().close).start()
        assert uploader.send_all(workspace / ".scratch/runs") == (1, {})
    assert [client(workspace).get_run(run).info.status for run in (parent_id, child_id)] == ["KILLED", "KILLED"]
    assert uploader.send_all(workspace / ".scratch/runs") == (0, {})


def test_by_hand_a_run_is_one_call_of_dvc_and_goes_on_after_a_crash(workspace, monkeypatch, tmp_path):
    monkeypatch.delenv("DPO_RUN", raising=False)
    params, folder = load_params(), tmp_path
    first = run_name(params, folder)
    assert run_name(params, folder) == first  # the same caller
    state = json.loads((folder / "by-hand.json").read_text())
    (folder / "by-hand.json").write_text(json.dumps({**state, "caller": "another", "status": "RUNNING"}))
    assert run_name(params, folder) == first  # it did not end: go on
    (folder / "by-hand.json").write_text(json.dumps({**state, "run": "old", "caller": "another", "status": "FINISHED"}))
    assert run_name(params, folder) != "old"


def test_nested_values_are_flattened():
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": {}}) == {"a.b": 1, "a.c.d": 2, "e": {}}


def test_a_journal_with_half_a_line_is_read_up_to_it(tmp_path):
    run = StageJournal(tmp_path, "train")
    run.metrics(1, {"loss": 0.5})
    with run.path.open("a") as file:
        file.write('{"kind": "metr')
    (line,), _ = read_journal(run.path)
    assert (line["step"], line["values"]) == (1, {"loss": 0.5})
