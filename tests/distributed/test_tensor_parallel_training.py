"""Trainings whose ranks share the weights of each layer: losses, metrics and weights of one rank, in every mode."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from tests.distributed.test_sequence_parallel_training import assert_same_course
from tests.support.engine import CLIP, HEADS, LORA, SHAPE, make_pairs, run_groups, save, settings
from training.models.loading import load_model
from training.scoring.logps import plain_logps

pytestmark = pytest.mark.slow
SHORT = {"max_steps": 4, "save_steps": 2, "max_grad_norm": CLIP, "learning_rate": 1e-2}
ADAPTER = {**LORA, "lora_plus_ratio": 4.0, "init": "pissa"}
RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": ADAPTER, "activation_checkpointing": "offload", "mlp_tile_tokens": 16},
    "moving": {"reference_update": {"every": 1, "alpha": 0.6}},
}
Plan = tuple[str, dict[str, Any]]
Logs = dict[str, tuple[Path, list[dict]]]  # by label: the folder of a run and its log
PLANS: dict[int, list[Plan]] = {
    1: [("full", {"zero_stage": 2})],
    2: [("full", {"zero_stage": 2, "offload": "optimizer"})],
}
MORE: dict[int, list[Plan]] = {  # of the exhaustive tests
    1: [("lora", {"zero_stage": 2}), ("moving", {"zero_stage": 2})],
    2: [("full", {"zero_stage": 3}), ("lora", {"zero_stage": 2})],
    4: [("full", {"zero_stage": 1}), ("moving", {"zero_stage": 3})],
}
AGAIN, MORE_AGAIN = ["2x full ZeRO-2 offload"], ["4x full ZeRO-1", "4x moving ZeRO-3"]


def label(ranks: int, name: str, changes: dict[str, Any]) -> str:
    return f"{ranks}x {name} ZeRO-{changes['zero_stage']}{' offload' if 'offload' in changes else ''}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model"), Qwen3Config(**SHAPE, **HEADS, head_dim=8))


@pytest.fixture(scope="module")
def logs(tmp_path_factory, model) -> Logs:
    """One rank, and two that share layers."""
    return train_all(tmp_path_factory.mktemp("runs"), model, PLANS)


@pytest.fixture(scope="module")
def more_logs(tmp_path_factory, model, logs) -> Logs:
    """More modes, and two groups of two ranks."""
    return logs | train_all(tmp_path_factory.mktemp("more"), model, MORE)


def train_all(root: Path, model: Path, plans: dict[int, list[Plan]]) -> Logs:
    pairs, runs = make_pairs(model), {}
    for ranks, plan in plans.items():
        options = {**SHORT, "tensor_parallel": min(2, ranks)}
        made = [
            settings(root, model, label(ranks, name, changes), pairs, **options | RUNS[name] | changes)
            for name, changes in plan
        ]
        again = [run for run in made if run["name"] in (*AGAIN, *MORE_AGAIN)]
        runs[ranks] = [*made, *({**run, "name": f"{run['name']} again", "again_from": 2} for run in again)]
    if plans is PLANS:
        runs[2].append({**runs[2][0], "name": "whole layers", "tensor_parallel": 1})
    logs = run_groups(root, runs)
    return {
        str(run["name"]): (Path(str(run["folder"])), logs[str(run["name"])]) for made in runs.values() for run in made
    }


def test_a_training_with_shared_layers_follows_that_of_one_rank(logs):
    assert_follows_one_rank(logs, "2x full ZeRO-2 offload")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [label(ranks, *run) for ranks in (2, 4) for run in MORE[ranks]])
def test_every_mode_with_shared_layers_follows_that_of_one_rank(more_logs, name):
    assert_follows_one_rank(more_logs, name)


def assert_follows_one_rank(logs: Logs, name: str) -> None:
    (folder, log), (one_folder, expected) = logs[name], logs[f"1x {name.split()[1]} ZeRO-2"]
    counted = [line for line in expected if "step" in line]
    if "offload" in name:  # DeepSpeed keeps its gradients elsewhere
        counted = [{n: v for n, v in line.items() if n != "num_zeros_in_grad"} for line in counted]
    assert_same_course(log, counted)
    file = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    found, weights = (load_file(path / "policy" / file) for path in (folder, one_folder))
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in weights.items()}
    for key, value in weights.items():
        assert (found[key] - value).abs().max() < 1e-4, key


def test_a_resumed_training_follows_the_undisturbed_one(logs):
    assert_again_follows(logs, "2x full ZeRO-2 offload")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE_AGAIN)
def test_two_groups_that_resume_follow_the_undisturbed_ones(more_logs, name):
    assert_again_follows(more_logs, name)


def assert_again_follows(logs: Logs, name: str) -> None:
    log, expected = logs[f"{name} again"][1], logs[name][1]
    assert_same_course(log, [line for line in expected if line.get("step", 0) > 2])


def test_the_saved_policy_is_an_ordinary_model(logs):
    policies = [logs[name][0] / "policy" for name in ("1x full ZeRO-2", "2x full ZeRO-2 offload")]
    expected, found = (
        plain_logps(load_model(policy, "float32"), [1, 2, 3], [4, 5], torch.device("cpu")) for policy in policies
    )
    assert torch.allclose(found, expected, atol=1e-4)
    assert sorted(path.name for path in policies[0].iterdir()) == sorted(path.name for path in policies[1].iterdir())


def test_a_checkpoint_of_shared_layers_is_refused_by_a_training_with_whole_layers(logs):
    (refusal,) = [line["refused"] for line in logs["whole layers"][1] if "refused" in line]
    assert "2 workers under ZeRO-2 with tensor_parallel 2, and this training has 2 workers under ZeRO-2 with" in refusal
    assert "Set num_workers, zero_stage and tensor_parallel of actor_train" in refusal
