"""TR-DPO: the reference follows the policy as in a plain torch loop, on one rank and two; resumed runs are exact."""

import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.engine import BATCH, CPU, LORA, RATE, batch_pairs, make_model, make_pairs, run_ranks, settings
from training.models import adapters
from training.models.loading import load_model
from training.objectives.objective import Objective
from training.pairs import batches
from training.pairs.pair import Pair
from training.scoring.logps import plain_logps

pytestmark = pytest.mark.slow
SOFT, HARD = {"every": 2, "alpha": 0.6}, {"every": 3, "alpha": 1.0}
OBJECTIVE = ({"sigmoid": 1.0}, {"beta": 0.5})
RUNS = {
    "zero1-full-soft": {"zero_stage": 1, "reference_update": SOFT},
    "zero2-lora-soft": {"zero_stage": 2, "reference_update": SOFT, "adapter": LORA},
    "zero2-full-hard": {"zero_stage": 2, "reference_update": HARD},
    "zero3-full-soft": {"zero_stage": 3, "reference_update": SOFT},
}
RESUMED = ("zero2-lora-soft", "zero3-full-soft")
ZERO3_LORA = {"zero_stage": 3, "reference_update": HARD, "adapter": LORA}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pairs(model) -> list[Pair]:
    return make_pairs(model)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, model, pairs) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("two")
    logs = run_and_resume(folder, model, pairs, RUNS)
    logs["folder"] = str(folder)  # type: ignore[assignment]
    return logs


def run_and_resume(folder: Path, model: Path, pairs: list[Pair], modes: dict[str, dict]) -> dict[str, list[dict]]:
    """The runs on two ranks, and then those that are resumed from step 5."""
    common = {"objective": OBJECTIVE, "save_steps": 5, "learning_rate": RATE}
    runs = [settings(folder, model, name, pairs, **common, **mode) for name, mode in modes.items()]
    resumed = [run for run in runs if run["name"] not in RUNS or run["name"] in RESUMED]
    return run_ranks(folder, 2, runs + [{**run, "name": f"{run['name']}-again", "again_from": 5} for run in resumed])


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, model, pairs, two_ranks) -> dict[str, list[dict]]:
    """A run from the start, and one from a checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("one")
    common = {"objective": OBJECTIVE, "save_steps": 100, "learning_rate": RATE}
    names = ("zero1-full-soft", "zero2-lora-soft", "zero3-full-soft")
    runs = [settings(folder, model, name, pairs, **common, **RUNS[name]) for name in names]
    for run in runs[1:]:
        saved = Path(str(run["name"])) / "step-00000005"
        shutil.copytree(two_ranks["folder"] / saved, folder / saved)
    return run_ranks(folder, 1, runs)


def plain_run(model: Path, pairs: list[Pair], lora: bool, every: int, alpha: float) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, with a whole second model as the reference."""
    policy = load_model(model, "float32")
    policy = adapters.add_adapter(policy, **LORA, seed=0) if lora else policy
    reference = deepcopy(policy)
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=RATE, weight_decay=0.01)
    steps, seen = batches.total_steps(len(pairs), BATCH, 2, None), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = batches.learning_rate(step, steps, RATE, 0.1, "cosine")
        numbers = batches.step_pairs(step, len(pairs), BATCH, seed=0)
        loss = batch_loss(policy, [scored(reference, pairs[number]) for number in numbers])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
        if (step + 1) % every == 0:
            with torch.no_grad():
                for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
                    old.copy_(alpha * new + (1 - alpha) * old)
    return seen


def batch_loss(policy: torch.nn.Module, pairs: list[Pair]) -> torch.Tensor:
    objective = Objective(*OBJECTIVE)
    return objective.losses(batch_pairs(policy, pairs, objective)[0])["loss"].mean()


@torch.no_grad()
def scored(reference: torch.nn.Module, pair: Pair) -> Pair:
    chosen, rejected = (
        plain_logps(reference, pair.prompt_ids, r, CPU).tolist() for r in (pair.chosen_ids, pair.rejected_ids)
    )
    return replace(pair, ref_chosen_logps=chosen, ref_rejected_logps=rejected)


@pytest.fixture(scope="module")
def plain(model, pairs) -> dict[str, list[tuple[float, float]]]:
    return {name: plain_run(model, pairs[8:], "lora" in name, **RUNS[name]["reference_update"]) for name in RUNS}


def steps(log: list[dict]) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in log if "loss" in line]


def assert_same(log: list[dict], expected: list[tuple[float, float]]) -> None:
    for (loss, norm), (expected_loss, expected_norm) in zip(steps(log), expected, strict=True):
        assert loss == pytest.approx(expected_loss, abs=2e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_match_a_plain_loop_with_two_models(two_ranks, plain, name):
    assert_same(two_ranks[name], plain[name])


def test_a_hard_update_makes_the_policy_its_own_reference(two_ranks):
    """The step after an update starts at ln 2; with a fixed reference the loss would differ."""
    losses = [line["loss"] for line in two_ranks["zero2-full-hard"] if "loss" in line]
    assert [losses[n] for n in (0, 3, 6)] == pytest.approx([0.693147] * 3, abs=1e-5)
    assert all(abs(losses[n] - 0.693147) > 1e-4 for n in (1, 2, 4, 5, 7))


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_bit_identical(two_ranks, name):
    assert_resumed(two_ranks, name)


def assert_resumed(logs: dict[str, list[dict]], name: str) -> None:
    after = [line for line in logs[name] if line.get("step", 0) > 5]
    resumed = [line for line in logs[f"{name}-again"] if "step" in line]
    for line, expected in zip(resumed, after, strict=True):
        names = [key for key in expected if not key.endswith("per_second")]
        assert {key: line[key] for key in names} == {key: expected[key] for key in names}


@pytest.mark.exhaustive
def test_a_sharded_adapter_matches_a_plain_loop_and_resumes_and_so_does_zero_1(tmp_path, model, pairs):
    logs = run_and_resume(tmp_path, model, pairs, {"zero3-lora": ZERO3_LORA, "zero1": RUNS["zero1-full-soft"]})
    assert_same(logs["zero3-lora"], plain_run(model, pairs[8:], lora=True, **HARD))
    assert_resumed(logs, "zero3-lora")
    assert_resumed(logs, "zero1")


def test_one_rank_matches_and_resumes_from_two_ranks(one_rank, plain):
    assert_same(one_rank["zero1-full-soft"], plain["zero1-full-soft"])
    for name in ("zero2-lora-soft", "zero3-full-soft"):
        assert_same(one_rank[name], plain[name][5:])


def test_the_cost_is_reported_and_held_out_pairs_keep_the_original_reference(two_ranks, pairs):
    said = [line["said"] for line in two_ranks["zero1-full-soft"] if "said" in line]
    assert any("after step 2 each row takes one more forward pass" in sentence for sentence in said)
    policy = load_model(Path(two_ranks["folder"]) / "zero2-full-hard" / "policy", "float32")
    with torch.no_grad():
        expected = batch_loss(policy, pairs[:8]).item()  # with the stored reference values
    assert two_ranks["zero2-full-hard"][-1]["eval/loss"] == pytest.approx(expected, abs=1e-5)
