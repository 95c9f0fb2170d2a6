"""Kill the training driver, then a worker, in the middle of a run: the same weights in the end, bit for bit."""

import csv
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mlflow import MlflowClient

from tasks.files import hash_files, read_json, sha256, write_json
from tasks.params import overlay, read_yaml
from tasks.tracking.forward import send_all
from tasks.tracking.journal import read_lines, unsent
from tests.proxy import proxied
from tests.sockets import listeners, outside_loopback
from tests.workspaces import run, start, tensorboard, wait_for, wait_for_step, workers, write_cluster

pytestmark = pytest.mark.slow


def checkpoints(workspace: Path) -> set[str]:
    return {path.name for path in workspace.glob(".scratch/train/*/step-*")}


def wait_for_checkpoint(process: subprocess.Popen[str], workspace: Path) -> None:
    before = checkpoints(workspace)
    while not checkpoints(workspace) - before:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def test_a_dead_worker_ends_a_run_that_may_not_start_again(referenced, tmp_path):
    workspace = Path(shutil.copytree(referenced, tmp_path / "alone"))
    write_cluster(workspace, {"actor_train.max_failures": 0})
    driver = start(workspace, "train")
    group = workers(driver)
    wait_for_checkpoint(driver, workspace)  # what dies while the group starts, Ray Train starts again without counting
    group[1].kill()
    said, _ = driver.communicate(timeout=300)
    assert driver.returncode != 0
    assert "the workers start again" not in said
    assert not (workspace / "data/policy").exists()


def test_killed_runs_end_with_the_weights_of_an_undisturbed_one(referenced, trained, tmp_path):
    workspace = Path(shutil.copytree(referenced, tmp_path / "disturbed"))
    first = start(workspace, "train")
    orphans = workers(first)
    wait_for_checkpoint(first, workspace)
    assert len(listeners(first.pid)) > 5  # Ray's processes and gloo's pairs are among them
    assert outside_loopback(first.pid) == {}
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not (workspace / "data/policy").exists()
    _, alive = psutil.wait_procs(orphans, timeout=10)
    assert not alive  # nobody trains for a dead driver

    second = start(workspace, "train")
    group = workers(second)
    wait_for_checkpoint(second, workspace)
    group[1].kill()
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert "resuming from the checkpoint of step" in said
    assert said.count("the workers start again, from the last checkpoint") == 1

    for name in ("data/policy/adapter_model.safetensors", "data/metrics/train.csv", "data/metrics/train.json"):
        assert (workspace / name).read_bytes() == (trained / name).read_bytes(), name
    (journal,) = workspace.glob(".scratch/runs/*/train.jsonl")  # the second call continued the first one's run
    steps = [line["step"] for line in read_lines(journal)[0] if "loss" in line.get("values", {}) and "step" in line]
    assert steps == list(range(1, len(steps) + 1))  # and logged a repeated step once
    with (workspace / "data/metrics/train.csv").open() as file:
        losses = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    shown = tensorboard(journal.parent / "tensorboard")["loss"]
    assert [step for step, _ in shown] == [step for step, _ in losses]
    assert [value for _, value in shown] == pytest.approx([value for _, value in losses])


def test_a_worker_that_gets_sigterm_saves_a_checkpoint_and_the_run_goes_on_from_it(referenced, trained, tmp_path):
    """No failure is counted: the run may not start again after one."""
    workspace = Path(shutil.copytree(referenced, tmp_path / "preempted"))
    write_cluster(workspace, {"actor_train.max_failures": 0, "actor_train.save_steps": 1000})
    driver = start(workspace, "train")
    group = workers(driver)
    journal = wait_for_step(driver, workspace)
    group[1].terminate()
    said, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, said
    (step,) = map(int, re.findall(r"a worker was asked to end: the checkpoint of step (\d+) is saved", said))
    assert said.count("the workers start again, from the last checkpoint") == 1
    steps = [line["step"] for line in read_lines(journal)[0] if "loss" in line.get("values", {})]
    assert steps == list(range(1, len(steps) + 1))  # nothing was computed twice
    assert 0 < step < len(steps)
    weights = "data/policy/adapter_model.safetensors"
    assert (workspace / weights).read_bytes() == (trained / weights).read_bytes()


def test_after_damage_and_a_stop_during_a_save_the_weights_are_the_same(trained, tmp_path):
    workspace = Path(shutil.copytree(trained, tmp_path / "damaged"))
    shutil.rmtree(workspace / "data/policy")
    newest = max(workspace.glob(".scratch/train/*/step-*"))
    part = next(newest.rglob("*optim_states.pt"))
    part.write_bytes(part.read_bytes()[:-100])
    stopped = start(workspace, "train")
    while not list(workspace.glob(".scratch/train/*/.step-*")):  # being written
        assert stopped.poll() is None, stopped.communicate()[0]
        time.sleep(0.002)
    stopped.send_signal(signal.SIGTERM)
    said, _ = stopped.communicate(timeout=60)
    assert stopped.returncode != 0
    assert f"{newest.name} is not used" in said
    assert not (workspace / "data/policy").exists()
    run(workspace, "train")
    weights = "data/policy/adapter_model.safetensors"
    assert (workspace / weights).read_bytes() == (trained / weights).read_bytes()


def set_params(workspace: Path, **changes: Any) -> None:
    content = overlay(read_yaml(workspace / "params.yaml"), {"train": changes})
    (workspace / "params.yaml").write_text(yaml.safe_dump(content))


def test_a_finished_run_is_extended_by_its_name(trained, tmp_path):
    workspace = Path(shutil.copytree(trained, tmp_path / "extended"))
    (note,) = workspace.glob(".scratch/runs/*/training")
    (training,) = (path.parent for path in workspace.glob(".scratch/train/*/attempt"))
    note.write_text(str(training))  # the workspace has moved
    name, last = note.parent.name, max(training.glob("step-*"))
    steps = int(last.name.removeprefix("step-"))
    longer = steps // 4 * 5
    set_params(workspace, resume_from_checkpoint=name, epochs=5)
    said = run(workspace, "train")
    assert (
        f"resuming from step {steps} of run {name}: train.epochs 4 -> 5, "
        f"the learning-rate schedule is recomputed over {longer} steps"
    ) in said
    rows = (workspace / "data/metrics/train.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(steps + 1, longer + 1))
    tags = [line["values"] for line in every_line(workspace) if "resumed_from" in line.get("values", {})]
    assert tags == [{"resumed_from": str(last), "resumed_from_sha256": sha256(last / "manifest.json")}]
    (notes,) = [p for p in workspace.glob(".scratch/runs/*/addresses") if p.read_text().count("train/") == 2]
    assert f"train/{training.name}" in notes.read_text().split()  # `make gc` keeps it as long as this run


def every_line(workspace: Path) -> list[dict[str, Any]]:
    return [line for path in workspace.glob(".scratch/runs/*/train.jsonl") for line in read_lines(path)[0]]


def test_a_tracking_server_that_only_fails_costs_neither_weights_nor_figures(referenced, trained, tmp_path):
    """With 500 to every call training ends with the same weights; once the store is good, each step is there once."""
    workspace = Path(shutil.copytree(referenced, tmp_path / "unheard"))
    with proxied("http://127.0.0.1:9") as proxy:
        proxy.mode = "error"
        write_cluster(workspace, {"tracking_uri": proxy.address})
        said = run(workspace, "train")
        assert proxy.requests > 0
    assert "MLflow could not be reached; the figures of train are kept" in said
    assert hash_files(workspace / "data/policy") == hash_files(trained / "data/policy")
    (folder,) = {path.parent for path in workspace.glob(".scratch/runs/*/train.jsonl") if unsent(path.parent)}
    settings = read_json(folder / "settings.json")
    write_json(folder / "settings.json", {**settings, "tracking_uri": f"sqlite:///{workspace}/.mlflow/mlflow.db"})
    wait_for(lambda: send_all(folder.parent) and not unsent(folder), 60)  # its own forwarder may give up just now
    assert curve(workspace, folder) == curve(trained, None)


def curve(workspace: Path, folder: Path | None) -> list[tuple[int, float]]:
    """The loss by step as MLflow has it, in the order of steps; a step that is there twice shows twice."""
    folder = folder or next(path.parent for path in workspace.glob(".scratch/runs/*/train.run.json"))
    client = MlflowClient(f"sqlite:///{workspace}/.mlflow/mlflow.db")
    history = client.get_metric_history(read_json(folder / "train.run.json")["run_id"], "loss")
    assert len(history) > 10
    return sorted((point.step, point.value) for point in history)
