"""The worker group `inference` on a real Ray cluster: one worker and two, one of them killed, write the same files."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.cluster.worker_pool import Worker, WorkerPool
from tasks.config.cluster import load_cluster
from tasks.errors import UserError
from tasks.evaluate.scoring import evaluator_pool
from tests.support.workspaces import PROJECT, environment, shared_ray, shared_workers, write_cluster
from training.evaluation.hardware import gpus

# Small batches, so that prompts and pairs make several tasks.
DRIVER = """
import runpy, sys
LARGE = {"transformers", "peft", "deepspeed"}
for name in LARGE:
    sys.modules.pop(name, None)  # this process was forked from one that has them
from tasks.evaluate import drawing, scoring
drawing.BATCH, scoring.ROWS = 4, 2
sys.argv[1:] = ["evaluate"]
runpy.run_module("tasks", run_name="__main__")
print("the driver imported", sorted(LARGE & sys.modules.keys()), flush=True)
"""


@pytest.fixture
def workspace(tmp_path: Path, referenced: Path, adapter: Path) -> Path:
    root = Path(shutil.copytree(referenced, tmp_path / "workspace", symlinks=True))
    params = root / "params.yaml"
    params.write_text(params.read_text().replace("prompts: 4", "prompts: 17"))
    shutil.copytree(adapter, root / "data/policy")
    return root


def start(workspace: Path, workers: int, **variables: str) -> subprocess.Popen[str]:
    write_cluster(workspace, {"inference.num_workers": workers, "inference.row_tokens": 128})
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=workspace,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def files(workspace: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (workspace / "data/metrics").iterdir()}


def at_work(driver: subprocess.Popen[str]) -> psutil.Process:
    """A worker that is running a task."""
    while True:
        assert driver.poll() is None, driver.communicate()[0]
        if found := shared_workers(driver, "Evaluator.s"):  # sample or score
            return found[0]
        time.sleep(0.02)


@pytest.mark.slow
def test_two_workers_one_killed_write_the_same_files_as_one_worker_and_the_driver_loads_no_model(workspace: Path):
    driver = start(workspace, 1, FORK_STAGES="1")
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode == 0, output
    assert re.search(r"evaluate: (\d+)/\1 answers\n(.*\n)*evaluate: (\d+)/\3 pairs\n", output)
    alone = files(workspace)
    assert {"evaluate.json", "samples.jsonl", "pairs.jsonl"} <= alone.keys()
    shutil.rmtree(workspace / "data/metrics")

    (workspace / "data/metrics").mkdir()
    driver = start(workspace, 2, FORK_STAGES="1", **shared_ray())
    at_work(driver).kill()
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode == 0, output
    assert re.search(r"evaluate: (\d+)/\1 answers\n(.*\n)*evaluate: (\d+)/\3 pairs\n", output)
    assert "the driver imported []" in output
    assert files(workspace) == alone


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_an_in_process_worker_with_a_gpu_configured_needs_a_gpu():
    asked = load_cluster(PROJECT, {"inference": {"gpus_per_worker": 1}})
    with (
        evaluator_pool(asked, "evaluate") as workers,
        pytest.raises(UserError, match=r"inference.gpus_per_worker is 1, but torch finds no GPU"),
    ):
        workers.map("has_vllm", [()])


def test_without_a_task_no_worker_is_started():
    cluster = load_cluster(PROJECT, {"inference": {"num_workers": 9}})
    with WorkerPool(cluster, cluster.inference, Worker, "export") as workers:
        assert workers.map("call", []) == []
        assert not workers.actors
