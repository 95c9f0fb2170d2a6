"""The whole demo on a real Prefect server: `dpo run --recipe demo`, then a check of all its results."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.config.metrics import BY_DATA, of_evaluation
from tasks.config.params import load_params
from tasks.config.paths import version
from tasks.system.files import read_json
from tasks.tracking.journal import flatten_metrics
from tasks.tracking.verify import problems
from tests.support.deployed import ask, newest_table, worker
from tests.support.fork_server import with_torch

PROJECT = Path(__file__).resolve().parents[2]
STAGES = ["source", "prepare", "reference", "train", "evaluate", "export"]
ALL = [*STAGES, "promote"]
# As a newcomer runs it, but with one rank of training, half of the prompts and no evaluation during training.
OVERRIDES = {"cluster.actor_train.num_workers": 1, "train.eval_steps": None, "evaluate.prompts": 100}
DEMO = ["--recipe", "demo", *(f"--set={name}={json.dumps(value)}" for name, value in OVERRIDES.items())]
pytestmark = pytest.mark.slow
Env = dict[str, str]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as a newcomer has it, uncommitted changes included."""
    root = tmp_path_factory.mktemp("newcomer") / "dpo"
    listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (PROJECT / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, root / name)
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], [*who, "commit", "-q", "-m", "as it comes"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


@pytest.fixture(scope="module")
def run_of_demo(checkout: Path, prefect_api: Env) -> str:
    """What `dpo run --recipe demo` prints."""
    done = dpo(checkout, with_torch(prefect_api), "run", *DEMO)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(checkout / "data") == [".gitignore"]  # it worked in a worktree of its own
    return done.stdout


@pytest.fixture(scope="module")
def ran(checkout: Path, run_of_demo: str) -> Path:
    return checkout


@pytest.fixture(scope="module")
def opened(ran: Path, prefect_api: Env) -> Path:
    """The run's files, checked out again: its worktree is removed."""
    (name,) = [path.name for path in (ran / ".scratch" / "runs").iterdir() if (path / "record.json").exists()]
    assert dpo(ran, prefect_api, "open", name).returncode == 0
    return ran / ".scratch" / "open" / name


def dpo(root: Path, env: Env, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", *arguments]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=1800)


def dvc_by_hand(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "FORK_STAGES": "1"}
    return subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, env=env, capture_output=True, text=True)


def dvc(root: Path, *arguments: str) -> str:
    done = dvc_by_hand(root, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def client(root: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{root}/.mlflow/mlflow.db")


def test_the_demo_runs_every_stage_and_prints_its_progress_and_result(
    ran: Path, run_of_demo: str, prefect_api: Env
) -> None:
    assert newest_table(prefect_api) == dict.fromkeys(ALL, "ran")
    keys = {artifact["key"] for artifact in ask(prefect_api, "artifacts/filter", {})}
    assert keys >= {"dpo-result", "dpo-report", "dpo-stages", *(f"{stage}-progress" for stage in ALL)}
    assert {run["name"] for run in ask(prefect_api, "task_runs/filter", {})} >= set(ALL)
    check_progress(run_of_demo.splitlines())
    assert re.search(r"(?m)^train: \d+/\d+ steps, .*loss", run_of_demo)
    for part in ("answers kindly", "win rate", "dpo open", "dpo up", "dpo-demo version 1 is champion"):
        assert part in run_of_demo


def check_progress(lines: list[str]) -> None:
    stages = [line.partition(":")[0] for line in lines if line.partition(":")[0] in STAGES]
    assert list(dict.fromkeys(stages)) == STAGES
    assert not [line for line in lines if "Finished in state" in line or "deployment" in line]  # Prefect's own


def test_the_model_learnt_the_preference_and_stays_correct(opened: Path) -> None:
    metrics = read_json(opened / "data/metrics/evaluate.json")
    base, policy = metrics["samples"]["base"], metrics["samples"]["policy"]
    assert 0.35 <= base["kind"] <= 0.65
    assert policy["kind"] >= 0.95
    assert policy["correct"] >= base["correct"] - 0.02 >= 0.9
    assert metrics["rewards/accuracies"] >= 0.98
    assert metrics["rewards/chosen"] > 0  # reward accuracy alone proves nothing


def test_the_gate_knows_every_metric_of_an_evaluation(opened: Path) -> None:
    values = flatten_metrics(read_json(opened / "data/metrics/evaluate.json"))
    measured = {name for name in values if not name.startswith((*BY_DATA, "intervals/"))}
    known = set(of_evaluation(load_params(opened / "params.yaml")))
    assert measured <= known
    assert all(name.startswith("length_bias/") for name in known - measured)  # a group without pairs has no accuracy


def test_the_export_loads_alone_and_matches_its_manifest(opened: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = opened / "data/model"
    manifest = read_json(model / "manifest.json")
    monkeypatch.setenv("DPO_HOME", str(opened))  # a worktree: the checkout's key signed it
    assert problems(model) == []
    assert manifest["checks"]["largest_logit_difference"] < 1e-3
    assert manifest["checks"]["same_greedy_text"]
    assert manifest["made"]["clean"]
    assert manifest["made"]["version"] == version()
    assert str(opened) not in json.dumps(manifest)
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in model.rglob("*"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = [{"role": "user", "content": "Hurry up. Ana put the red cup under the bed. Where is the red cup?"}]
    given = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = AutoModelForCausalLM.from_pretrained(model).generate(**given, max_new_tokens=32, do_sample=False)
    text = tokenizer.decode(answer[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    from tasks.artifacts import demo

    assert demo.judge(prompt[0]["content"], text) == {"kind": True, "correct": True}, text


def test_mlflow_has_a_parent_a_child_per_stage_curves_and_a_champion(ran: Path) -> None:
    store = client(ran)
    experiment = store.get_experiment_by_name("dpo").experiment_id
    runs = store.search_runs([experiment])
    (parent,) = [run for run in runs if "stage" not in run.data.tags]
    children = {run.data.tags["stage"]: run for run in runs if "stage" in run.data.tags}
    assert set(children) == set(ALL)
    assert all(run.data.tags["mlflow.parentRunId"] == parent.info.run_id for run in children.values())
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {parent.data.tags[f"stage.{stage}"] for stage in ALL} == {"ran"}
    assert parent.data.params["train.beta"] == "0.1"
    assert parent.data.metrics["samples/policy/kind"] >= 0.95
    assert len(store.get_metric_history(children["train"].info.run_id, "loss")) > 5
    assert "curves.png" in [file.path for file in store.list_artifacts(children["train"].info.run_id)]
    assert {data.dataset.name for data in children["prepare"].inputs.dataset_inputs} == {"train", "eval"}
    version = store.get_model_version_by_alias("dpo-demo", "champion")
    assert version.run_id == parent.info.run_id
    place = f"model/{version.tags['manifest_sha256'][:12]}"
    assert f"{place}/model.safetensors" in [file.path for file in store.list_artifacts(parent.info.run_id, place)]
    assert "report.html" in [file.path for file in store.list_artifacts(parent.info.run_id)]


def running(said: str) -> list[str]:
    return [line.split("'")[1] for line in said.splitlines() if line.startswith("Running stage")]


def test_by_hand_dvc_finds_everything_up_to_date(opened: Path, tmp_path: Path) -> None:
    assert running(dvc(opened, "repro")) == ["fingerprint"]
    assert "train.json" in dvc(opened, "metrics", "show")
    assert "reference" in dvc(opened, "dag")
    assert "index.html" in dvc(opened, "plots", "show", "-o", str(tmp_path))


def test_another_beta_reruns_train_evaluate_export_and_not_reference(opened: Path) -> None:
    params = opened / "params.yaml"
    before = params.read_text()
    try:
        params.write_text(before.replace("  beta: 0.1", "  beta: 0.2"))
        planned = running(dvc(opened, "repro", "--dry"))
    finally:
        params.write_text(before)
    assert planned == ["fingerprint", "train", "evaluate", "export"]


@pytest.mark.exhaustive
def test_a_worker_runs_the_deployment_which_is_fully_cached(ran: Path, prefect_api: Env) -> None:
    with worker(ran, with_torch(prefect_api)):
        done = dpo(ran, prefect_api, "follow", "dpo/full", *DEMO)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    first, *lines, last = done.stdout.splitlines()
    assert "/runs/flow-run/" in first
    check_progress(lines)
    assert done.stdout.count("unchanged, not run") == len(STAGES)
    assert re.search(r"^[\w-]+: Completed after \d+ s$", last)
    assert newest_table(prefect_api) == dict.fromkeys(STAGES, "cached") | {"promote": "ran"}


def test_an_export_that_fails_its_checks_keeps_the_previous_one(opened: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC removes outs before a stage runs; this one persists."""
    from safetensors.torch import load_file, save_file

    weights = opened / "data/policy/adapter_model.safetensors"
    before, tensors = weights.read_bytes(), load_file(weights)
    next(iter(tensors.values()))[0, 0] = float("nan")
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
        failed = dvc_by_hand(opened, "repro", "--single-item", "export")
    finally:
        weights.write_bytes(before)
    assert failed.returncode != 0
    assert "Nothing was exported." in failed.stderr
    monkeypatch.setenv("DPO_HOME", str(opened))
    assert problems(opened / "data/model") == []
    assert dvc(opened, "status").split() == ["fingerprint:", "always", "changed"]
