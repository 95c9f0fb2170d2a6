"""Stages as commands: user errors, exit codes, the workspace lock, and the end with the parent process."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.run_stage import STAGES
from tasks.system.lock import workspace_lock
from tests.support.workspaces import PROJECT, make_workspace, refusal, start

pytestmark = pytest.mark.slow


@pytest.fixture
def workspace(tmp_path: Path, mlflow_store: Path) -> Path:
    root = make_workspace(tmp_path / "workspace", tmp_path / "no-model")
    shutil.copytree(mlflow_store, root / ".mlflow")
    return root


def change(workspace: Path, old: str, new: str) -> None:
    path = workspace / "params.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_typo_in_params_is_an_error_message_without_traceback(workspace: Path) -> None:
    change(workspace, "  beta: 0.1", "  betaa: 0.1")
    process = start(workspace, "source")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 2
    assert output.splitlines() == [
        "error: params.yaml: `train.beta` is missing. Add it.",
        "params.yaml: Unknown key `train.betaa`. Did you mean `train.beta`?",
    ]


def test_a_missing_base_model_is_named(workspace: Path) -> None:
    sentence = refusal(workspace, "source")
    assert f"source.model: there is no model in {workspace.parent / 'no-model'} (no config.json)." in sentence
    assert "hub:owner/name@revision" in sentence
    assert not (workspace / "data").exists()


@pytest.mark.parametrize("stage", ["train", "evaluate", "export"])
def test_a_stage_before_its_inputs_names_what_is_missing(stage: str, workspace: Path) -> None:
    sentence = refusal(workspace, stage)
    assert sentence.startswith("error: data/")
    assert " is missing: " in sentence
    assert "`dpo run`" in sentence


def test_a_second_stage_in_a_workspace_fails_with_the_process_that_holds_the_lock(workspace: Path) -> None:
    with workspace_lock(workspace):
        sentence = refusal(workspace, "source")
    assert f"Process {os.getpid()} on " in sentence
    assert "Wait until it ends, or stop it with `kill " in sentence


def test_a_stage_dies_with_its_parent_process(workspace: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(600)"
    stage = "import time, tasks.system.processes as p; p.die_with_parent(); print('up', flush=True); time.sleep(600)"
    caller = subprocess.Popen(
        [sys.executable, "-c", code, stage],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "up\n"
    (child,) = psutil.Process(caller.pid).children()
    os.kill(caller.pid, signal.SIGKILL)
    caller.wait()
    until = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the stage outlived its caller"
        time.sleep(0.05)


def test_a_python_without_the_packages_names_the_command_to_run(tmp_path: Path) -> None:
    bare = subprocess.run(
        [sys.executable, "-S", "-m", "tasks", "source"], cwd=PROJECT, capture_output=True, text=True, timeout=900
    )
    assert bare.returncode == 1
    assert "Run `source .venv/bin/activate`" in bare.stderr
    assert "Traceback" not in bare.stderr


def test_drivers_that_compute_nothing_do_not_load_torch() -> None:
    """Importing it takes seconds, also for a stage that is off or whose workers load it themselves."""
    drivers = ", ".join(module for stage, module in STAGES.items() if stage not in ("evaluate", "export"))
    controller = "tasks.cluster.ray_internals, tasks.cluster.rendezvous"  # of Ray Train, in a process of its own
    code = f"""
import sys, {drivers}
print(sorted({{'torch', 'transformers', 'ray', 'mlflow'}} & set(sys.modules)))
import {controller}
print(sorted({{'torch', 'transformers', 'mlflow'}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"
