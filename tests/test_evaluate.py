"""The stages evaluate and export, and promote after them, as commands, on an adapter of random weights."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tasks.files import hash_files, read_json
from tasks.tracking.registry import Registry
from tests.workspaces import PROJECT, refusal, run, start

pytestmark = pytest.mark.slow
MEASURED = ("evaluate.json", "samples.jsonl", "pairs.jsonl", "calibration.csv", "margins.csv")


@pytest.fixture(scope="module")
def sabotaged(referenced: Path, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A workspace whose policy is noise, with what the stages said."""
    from training import adapters
    from training.model import load_model

    workspace = shutil.copytree(referenced, tmp_path_factory.mktemp("sabotaged") / "workspace", symlinks=True)
    policy = adapters.add_adapter(load_model(tiny_base, "float32"), 4, 8, "all-linear", False, False, seed=0)
    for parameter in (p for p in policy.parameters() if p.requires_grad):
        parameter.data.normal_(0.0, 0.5)
    adapters.save_adapter(policy, dict(policy.named_parameters()), workspace / "data" / "policy", "base")
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("gguf: []", "gguf: [q8_0]"))
    return workspace, run(workspace, "evaluate", "export", "promote")


def test_random_weights_are_registered_and_not_promoted(sabotaged: tuple[Path, str]) -> None:
    workspace, said = sabotaged
    assert "promote: dpo-demo version 1 is registered and not promoted, because rewards/accuracies is" in said
    decision = read_json(workspace / "data/metrics/promote.json")
    assert not decision["promoted"]
    assert any("samples/policy/correct is 0 " in reason for reason in decision["reasons"])

    assert registered(workspace).at("challenger") is not None
    assert registered(workspace).at("champion") is None


def registered(workspace: Path) -> Registry:
    from mlflow import MlflowClient

    return Registry(MlflowClient(f"sqlite:///{workspace}/.mlflow/mlflow.db"), "dpo-demo")


def test_evaluation_measured_all_of_it(sabotaged: tuple[Path, str]) -> None:
    metrics = read_json(sabotaged[0] / "data/metrics/evaluate.json")
    low, high = (metrics["intervals"]["rewards/accuracies"][end] for end in ("low", "high"))
    assert low <= metrics["rewards/accuracies"] <= high
    assert metrics["win_rate"]["wins"] + metrics["win_rate"]["ties"] + metrics["win_rate"]["losses"] == 4
    assert metrics["kl/answers"] > 1  # noise is far from the base
    assert {*metrics["tables"]} == {"source", "length"}
    assert metrics["health"]["unfinished"] >= 0


def test_the_same_evaluation_twice_gives_the_same_numbers(sabotaged: tuple[Path, str]) -> None:
    workspace, _ = sabotaged
    folder = workspace / "data" / "metrics"
    before = {name: (folder / name).read_bytes() for name in MEASURED}
    run(workspace, "evaluate")
    assert {name: (folder / name).read_bytes() for name in MEASURED} == before


def test_a_version_that_was_evaluated_otherwise_is_asked_again(sabotaged: tuple[Path, str]) -> None:
    """Version 1 is this very policy, merged: asked anew with its own draws it says what it said."""
    workspace, _ = sabotaged
    found = registered(workspace)
    stored = found.fetch(found.versions()[0], "model", "manifest.json")
    before = stored.read_text()
    try:
        stored.write_text(before.replace('"max_new_tokens": 8', '"max_new_tokens": 9'))
        asked = subprocess.run(
            [sys.executable, "-m", "tasks.evaluation.compare", "1"],
            cwd=workspace,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
            capture_output=True,
            text=True,
        )
    finally:
        stored.write_text(before)
    assert "compare: version 1 answers the held-out prompts of today" in asked.stdout, asked.stderr
    assert re.search(r"samples/policy/kind .* n = 4", asked.stdout)
    assert re.search(r"rewards/accuracies +(\S+) +\1 .* n = 17", asked.stdout)  # scored anew, on the pairs of today


def test_a_check_that_fails_keeps_the_export_of_before_and_a_flipped_byte_is_found(sabotaged: tuple[Path, str]) -> None:
    workspace, _ = sabotaged
    before = hash_files(workspace / "data/model")
    assert {"model-q8_0.gguf", "Modelfile", "adapter/adapter_model.safetensors"} <= set(before)
    weights = workspace / "data/policy/adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "Nothing was exported." in refusal(workspace, "export")
    assert hash_files(workspace / "data/model") == before

    checked = start(workspace, "release.verify")
    assert "each as the signed manifest says" in checked.communicate(timeout=60)[0]
    gguf = workspace / "data/model/model-q8_0.gguf"
    content = bytearray(gguf.read_bytes())
    content[len(content) // 2] ^= 1
    gguf.write_bytes(content)
    checked = start(workspace, "release.verify")
    assert "model-q8_0.gguf has changed" in checked.communicate(timeout=60)[0]
    assert checked.returncode == 1
