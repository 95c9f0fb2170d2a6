"""One training with every interruption that we know, and a tracking server that fails: the same weights in the end."""

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

from tasks.config.params import overlay
from tasks.config.strict import read_yaml
from tasks.system.files import hash_files, read_json, sha256, write_json
from tasks.tracking.journal_reader import read_journal, read_lines, unsent
from tasks.tracking.uploader import send_all
from tests.support.proxy import proxied
from tests.support.sockets import listeners, outside_loopback
from tests.support.workspaces import (
    run,
    shared_workers,
    start,
    start_shared,
    tensorboard,
    wait_for,
    workers,
    write_cluster,
)

pytestmark = pytest.mark.slow
RESTART = "restarting the workers from the last checkpoint"


def files(workspace: Path, pattern: str) -> set[Path]:
    return set(workspace.glob(f".scratch/train/*/{pattern}"))


def wait_for_new(
    driver: subprocess.Popen[str], workspace: Path, pattern: str, before: set[Path], pause: float = 0.1
) -> None:
    """Until the training's folder has another file or folder with such a name."""
    while not files(workspace, pattern) - before:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(pause)


def wait_for_step_after(driver: subprocess.Popen[str], journal: Path, line: int) -> None:
    while not steps(read_lines(journal)[0][line:]):
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.1)


def steps(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if "loss" in line.get("values", {}) and "step" in line]


def notes(journal: Path, text: str) -> list[int]:
    """The numbers of the lines with such a message."""
    return [n for n, line in enumerate(read_lines(journal)[0]) if text in line.get("text", "")]


def test_a_training_with_every_interruption_ends_with_the_weights_of_an_undisturbed_one(referenced, trained, tmp_path):
    """Each interruption continues from the checkpoint that the one before it left."""
    workspace = Path(shutil.copytree(referenced, tmp_path / "disturbed"))
    with proxied("http://127.0.0.1:9") as proxy:
        proxy.mode = "error"  # MLflow answers every call with 500
        tracking = {"tracking_uri": proxy.address, "actor_train.num_workers": 2}
        write_cluster(workspace, {**tracking, "actor_train.max_failures": 0})
        lose_a_worker_that_may_not_restart(workspace)
        write_cluster(workspace, tracking)
        kill_the_driver(workspace)
        stop_during_a_save(workspace, damage_newest_checkpoint(workspace))
        write_cluster(workspace, {**tracking, "actor_train.max_failures": 1, "actor_train.save_steps": 1000})
        output = preempt_a_worker_and_kill_another(workspace)
        assert proxy.requests > 0
    assert "MLflow could not be reached" in output
    assert hash_files(workspace / "data/policy") == hash_files(trained / "data/policy")
    for name in ("data/policy/adapter_model.safetensors", "data/metrics/train.csv", "data/metrics/train.json"):
        assert (workspace / name).read_bytes() == (trained / name).read_bytes(), name
    (journal,) = workspace.glob(".scratch/runs/*/train.jsonl")  # every call continued the first one's run
    check_each_step_is_logged_once(workspace, journal)
    check_mlflow_gets_each_step_once(workspace, journal.parent, trained)


def started_workers(driver: subprocess.Popen[str]) -> list[psutil.Process]:
    """Both workers of a training on the shared cluster."""
    while len(found := shared_workers(driver, "RayTrainWorker")) < 2:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.2)
    return found


def assert_gone(group: list[psutil.Process]) -> None:
    """No worker trains without its driver, also on a cluster that outlives it."""
    _, alive = psutil.wait_procs(group, timeout=60)
    assert not alive


def lose_a_worker_that_may_not_restart(workspace: Path) -> None:
    driver = start_shared(workspace, "train")
    group = started_workers(driver)
    wait_for_new(driver, workspace, "step-*", set())  # Ray Train restarts a group that is not up yet without counting
    group[1].kill()
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode != 0
    assert RESTART not in output
    assert not (workspace / "data/policy").exists()
    assert_gone(group)


def damage_newest_checkpoint(workspace: Path) -> Path:
    newest = max(files(workspace, "step-*"))
    part = next(newest.rglob("*optim_states.pt"))
    part.write_bytes(part.read_bytes()[:-100])
    return newest


def kill_the_driver(workspace: Path) -> None:
    """It has a cluster of its own, which ends with it."""
    before = files(workspace, "step-*")
    driver = start(workspace, "train")
    group = workers(driver)
    wait_for_new(driver, workspace, "step-*", before)
    assert len(listeners(driver.pid)) > 5  # Ray's processes and gloo's pairs are among them
    assert outside_loopback(driver.pid) == {}
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert not (workspace / "data/policy").exists()
    assert_gone(group)


def stop_during_a_save(workspace: Path, damaged: Path) -> None:
    (journal,), before = files(workspace, "metrics.jsonl"), files(workspace, ".step-*")
    line = len(read_lines(journal)[0])
    driver = start_shared(workspace, "train")
    group = started_workers(driver)
    wait_for_step_after(driver, journal, line)
    wait_for_new(driver, workspace, ".step-*", before, pause=0.002)  # a checkpoint that is being written
    driver.send_signal(signal.SIGTERM)
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode != 0
    assert f"{damaged.name} is not used" in output
    assert not (workspace / "data/policy").exists()
    assert_gone(group)


def preempt_a_worker_and_kill_another(workspace: Path) -> str:
    """The one failure that is allowed is the kill: a preemption does not count."""
    (journal,) = files(workspace, "metrics.jsonl")
    line = len(read_lines(journal)[0])
    driver = start_shared(workspace, "train")
    group = started_workers(driver)
    wait_for_step_after(driver, journal, line)
    group[1].terminate()
    wait_for(lambda: driver.poll() is not None or notes(journal, RESTART), 300)
    wait_for_step_after(driver, journal, notes(journal, RESTART)[0])
    next(worker for worker in started_workers(driver) if worker not in group).kill()
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode == 0, output
    assert "resuming from the checkpoint of step" in output
    assert len(notes(journal, RESTART)) == 2
    *_, saved = map(int, re.findall(r"a worker was asked to stop: the checkpoint of step (\d+) is saved", output))
    lines = read_lines(journal)[0]
    *_, preempted = notes(journal, "a worker was asked to stop")  # the stop during a save may leave one, too
    assert steps(lines[:preempted])[-1] == saved
    assert steps(lines[preempted:])[0] == saved + 1  # nothing was computed twice
    return output


def check_each_step_is_logged_once(workspace: Path, journal: Path) -> None:
    assert not steps(read_lines(journal)[0])  # the training's own journal has the values, and no other file
    logged = steps(read_journal(journal)[0])
    assert logged == list(range(1, len(logged) + 1))
    with (workspace / "data/metrics/train.csv").open() as file:
        losses = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    shown = tensorboard(journal.parent / "tensorboard")["loss"]
    assert [step for step, _ in shown] == [step for step, _ in losses]
    assert [value for _, value in shown] == pytest.approx([value for _, value in losses])


def check_mlflow_gets_each_step_once(workspace: Path, folder: Path, trained: Path) -> None:
    """As soon as the store works again, whatever sends the journal sends every step once."""
    assert unsent(folder)
    store = f"sqlite:///{workspace}/.mlflow/mlflow.db"
    write_json(folder / "settings.json", {**read_json(folder / "settings.json"), "tracking_uri": store})
    wait_for(lambda: send_all(folder.parent) and not unsent(folder), 60)  # its own uploader may give up just now
    assert loss_history(workspace, folder) == loss_history(trained, None)


def loss_history(workspace: Path, folder: Path | None) -> list[tuple[int, float]]:
    """The loss by step as MLflow has it, in the order of steps; a step that is there twice shows twice."""
    folder = folder or next(path.parent for path in workspace.glob(".scratch/runs/*/train.run.json"))
    client = MlflowClient(f"sqlite:///{workspace}/.mlflow/mlflow.db")
    history = client.get_metric_history(read_json(folder / "train.run.json")["run_id"], "loss")
    assert len(history) > 10
    return sorted((point.step, point.value) for point in history)


@pytest.mark.exhaustive  # tests/train/test_continuation.py extends trainings, too
def test_a_finished_run_is_extended_by_its_name(trained, tmp_path):
    workspace = Path(shutil.copytree(trained, tmp_path / "extended"))
    (training_file,) = workspace.glob(".scratch/runs/*/training")
    (training,) = (path.parent for path in workspace.glob(".scratch/train/*/attempt"))
    training_file.write_text(str(training))  # the workspace has moved
    name, last = training_file.parent.name, max(training.glob("step-*"))
    before = int(last.name.removeprefix("step-"))
    longer = before // 4 * 5
    params = overlay(read_yaml(workspace / "params.yaml"), {"train": {"resume_from_checkpoint": name, "epochs": 5}})
    (workspace / "params.yaml").write_text(yaml.safe_dump(params))
    output = run(workspace, "train")
    assert (
        f"resuming from step {before} of run {name}: train.epochs 4 -> 5, "
        f"the learning-rate schedule is recomputed over {longer} steps"
    ) in output
    rows = (workspace / "data/metrics/train.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(before + 1, longer + 1))
    lines = [line for path in workspace.glob(".scratch/runs/*/train.jsonl") for line in read_lines(path)[0]]
    tags = [line["values"] for line in lines if "resumed_from" in line.get("values", {})]
    assert tags == [{"resumed_from": str(last), "resumed_from_sha256": sha256(last / "manifest.json")}]
    (addresses,) = [p for p in workspace.glob(".scratch/runs/*/addresses") if p.read_text().count("train/") == 2]
    assert f"train/{training.name}" in addresses.read_text().split()  # `dpo gc` keeps it as long as this run
