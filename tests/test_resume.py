"""Kill the training driver or a worker in the middle, run the same command again: the same weights, bit for bit."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tasks.tracking import read_lines
from tests.workspaces import make_workspace, run, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ready(tmp_path_factory, tiny_base) -> Path:
    """Everything before `train`."""
    workspace = make_workspace(tmp_path_factory.mktemp("resume"), tiny_base, rows=150)
    run(workspace, "source", "prepare", "reference")
    return workspace


@pytest.fixture(scope="module")
def undisturbed(ready, tmp_path_factory) -> Path:
    workspace = copy(ready, tmp_path_factory.mktemp("undisturbed") / "workspace")
    run(workspace, "train")
    return workspace


def copy(workspace: Path, target: Path) -> Path:
    return Path(shutil.copytree(workspace, target))


def wait_for_checkpoint(process: subprocess.Popen[str], workspace: Path) -> None:
    while not list(workspace.glob(".scratch/train/*/step-*")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def same_result(one: Path, other: Path) -> None:
    for name in ("data/policy/adapter_model.safetensors", "data/metrics/train.csv", "data/metrics/train.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_after_a_killed_driver_the_same_command_ends_with_the_same_weights(ready, undisturbed, tmp_path):
    workspace = copy(ready, tmp_path / "driver")
    process = start(workspace, "train")
    wait_for_checkpoint(process, workspace)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (workspace / "data/policy").exists()
    said = run(workspace, "train")
    assert "going on from the checkpoint of step" in said
    same_result(workspace, undisturbed)
    (journal,) = workspace.glob(".scratch/runs/*/train.jsonl")  # the second call continued the first one's run
    steps = [line["step"] for line in read_lines(journal)[0] if "loss" in line.get("values", {}) and "step" in line]
    assert steps == list(range(1, len(steps) + 1))  # and logged a repeated step once


def test_a_killed_worker_is_replaced_and_the_run_ends_with_the_same_weights(ready, undisturbed, tmp_path):
    workspace = copy(ready, tmp_path / "worker")
    process = start(workspace, "train")
    wait_for_checkpoint(process, workspace)
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in family if "RayTrainWorker" in " ".join(child.cmdline())]
    assert len(workers) == 2
    workers[1].kill()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    same_result(workspace, undisturbed)
