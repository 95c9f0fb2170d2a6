"""evaluate, export and promote as commands, on an adapter with random weights."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tasks.config.params import overlay
from tasks.config.strict import dotted, read_yaml
from tasks.system.files import hash_files, read_json
from tasks.tracking.registry import Registry
from tests.support.workspaces import PROJECT, refusal, run

pytestmark = pytest.mark.slow
MEASURED = ("evaluate.json", "samples.jsonl", "pairs.jsonl", "calibration.csv", "margins.csv")


@pytest.fixture(scope="module")
def sabotaged(referenced: Path, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A workspace whose policy is noise, and the output of the stages."""
    from training.models import adapters
    from training.models.loading import load_model

    workspace = shutil.copytree(referenced, tmp_path_factory.mktemp("sabotaged") / "workspace", symlinks=True)
    policy = adapters.add_adapter(load_model(tiny_base, "float32"), 4, 8, "all-linear", False, False, seed=0)
    for parameter in (p for p in policy.parameters() if p.requires_grad):
        parameter.data.normal_(0.0, 0.5)
    adapters.save_adapter(policy, dict(policy.named_parameters()), workspace / "data" / "policy", "base")
    params = workspace / "params.yaml"
    judged = {"source.data": "demo", "evaluate.judge": "demo", "export.gguf": ["q8_0"]}  # the rows are the demo's
    gate = {"promote.require": {"rewards/accuracies": 0.9, "samples/policy/correct": 0.9}}
    params.write_text(yaml.safe_dump(overlay(read_yaml(params), dotted(judged | gate))))
    return workspace, run(workspace, "evaluate", "export", "promote")


def test_random_weights_are_registered_and_not_promoted(sabotaged: tuple[Path, str]) -> None:
    workspace, output = sabotaged
    assert "promote: dpo-demo version 1 is not promoted, because rewards/accuracies is" in output
    decision = read_json(workspace / "data/metrics/promote.json")
    assert not decision["promoted"]
    assert any("samples/policy/correct is 0 " in reason for reason in decision["reasons"])

    assert registered(workspace).at("challenger") is not None
    assert registered(workspace).at("champion") is None


def registered(workspace: Path) -> Registry:
    from mlflow import MlflowClient

    return Registry(MlflowClient(f"sqlite:///{workspace}/.mlflow/mlflow.db"), "dpo-demo")


def test_evaluate_json_has_intervals_win_rate_kl_tables_and_health(sabotaged: tuple[Path, str]) -> None:
    metrics = read_json(sabotaged[0] / "data/metrics/evaluate.json")
    low, high = (metrics["intervals"]["rewards/accuracies"][end] for end in ("low", "high"))
    assert low <= metrics["rewards/accuracies"] <= high
    assert metrics["win_rate"]["wins"] + metrics["win_rate"]["ties"] + metrics["win_rate"]["losses"] == 4
    assert metrics["kl/answers"] > 1  # noise is far from the base model
    assert {*metrics["tables"]} == {"source", "length"}
    assert metrics["health"]["unfinished"] >= 0


@pytest.mark.exhaustive  # test_evaluators.py: once in the stage's process and once by two workers
def test_the_same_evaluation_twice_gives_the_same_numbers(sabotaged: tuple[Path, str]) -> None:
    workspace, _ = sabotaged
    folder = workspace / "data" / "metrics"
    before = {name: (folder / name).read_bytes() for name in MEASURED}
    run(workspace, "evaluate")
    assert {name: (folder / name).read_bytes() for name in MEASURED} == before


def dpo(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, env = [sys.executable, "-m", "cli", *arguments], {**os.environ, "PYTHONPATH": path, "FORK_STAGES": "1"}
    return subprocess.run(command, cwd=workspace, env=env, capture_output=True, text=True)


def test_a_version_with_other_evaluation_params_is_evaluated_again(sabotaged: tuple[Path, str]) -> None:
    """Version 1 is this policy, merged: evaluated again, with the same draws, it gives the same answers."""
    workspace, _ = sabotaged
    found = registered(workspace)
    stored = found.fetch(found.versions()[0], "model", "manifest.json")
    before = stored.read_text()
    try:
        stored.write_text(before.replace('"max_new_tokens": 8', '"max_new_tokens": 9'))
        compared = dpo(workspace, "compare", "1")
    finally:
        stored.write_text(before)
    assert (
        "compare: evaluating version 1 again: it was evaluated with max_new_tokens 9 instead of 8" in compared.stdout
    ), compared.stderr
    assert re.search(r"samples/policy/kind .* n = 4", compared.stdout)
    assert re.search(r"rewards/accuracies +(\S+) +\1 .* n = 17", compared.stdout)  # scored again, on today's pairs


def test_a_failed_check_keeps_the_previous_export_and_verify_finds_a_flipped_byte(sabotaged: tuple[Path, str]) -> None:
    workspace, _ = sabotaged
    before = hash_files(workspace / "data/model")
    assert {"model-q8_0.gguf", "Modelfile", "adapter/adapter_model.safetensors"} <= set(before)
    weights = workspace / "data/policy/adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "Nothing was exported." in refusal(workspace, "export")
    assert hash_files(workspace / "data/model") == before

    assert "all as in the signed manifest" in dpo(workspace, "verify").stdout
    gguf = workspace / "data/model/model-q8_0.gguf"
    content = bytearray(gguf.read_bytes())
    content[len(content) // 2] ^= 1
    gguf.write_bytes(content)
    checked = dpo(workspace, "verify")
    assert "model-q8_0.gguf has changed" in checked.stderr
    assert checked.returncode == 1
