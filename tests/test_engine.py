"""Training under DeepSpeed, one and two ranks, ZeRO 1, 2 and 3, against a plain torch loop without packing."""

import json
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from training import adapters, batches
from training.engine import deepspeed_config
from training.global_batch import Batch, calibrate
from training.logps import plain_logps
from training.losses import Pairs
from training.model import load_model
from training.objective import Objective
from training.packing import Pair

pytestmark = pytest.mark.slow
OBJECTIVE = ({"sigmoid": 1.0, "sft": 0.5}, {"beta": 0.1, "label_smoothing": 0.1})
MARGIN_SCALE = 0.5
SCORED = (OBJECTIVE[0], {**OBJECTIVE[1], "margin": "scores", "margin_scale": MARGIN_SCALE})
LORA = {"rank": 4, "alpha": 8.0, "targets": "all-linear", "use_rslora": False, "use_dora": False}
RATE, BATCH = 1e-3, 6
CPU = torch.device("cpu")
PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pairs(model) -> list[Pair]:
    return make_pairs(model)


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, **shape)).save_pretrained(folder)
    return folder


SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    """Convolutions ignore the boundaries of a packed row, so rows are computed in padded batches."""
    layers = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
    return save(tmp_path_factory.mktemp("hybrid"), Lfm2Config(**SHAPE, **HEADS, **layers))


@pytest.fixture(scope="module")
def sinks(tmp_path_factory) -> Path:
    """Attention that packed rows do not know, without weights that are read from outside their module."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return save(tmp_path_factory.mktemp("sinks"), GptOssConfig(**SHAPE, **HEADS, **experts))


def save(folder: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_pairs(model: Path) -> list[Pair]:
    rng, policy = random.Random(3), load_model(model, "float32")

    def tokens() -> list[int]:
        return [rng.randrange(61) for _ in range(rng.randint(2, 9))]

    made = []
    for number in range(8 + 22):  # eight held out; 22 in batches of 6: the last is short
        prompt, chosen, rejected = tokens(), tokens(), tokens()
        with torch.no_grad():
            ref_chosen, ref_rejected = (plain_logps(policy, prompt, r, CPU).tolist() for r in (chosen, rejected))
        masks = [1] * len(chosen), [1] * len(rejected)
        reference = {"ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
        made.append(Pair(str(number), prompt, chosen, rejected, *masks, **reference))
    return made


def plain_run(
    model: Path, pairs: list[Pair], lora: bool, objective: Objective, betas: list[float] | None = None
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, by two ordinary passes a pair and one backward pass a step."""
    policy = load_model(model, "float32")
    policy = adapters.add_adapter(policy, **LORA, seed=0) if lora else policy
    policy.train()
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=RATE, weight_decay=0.01)
    steps, seen = batches.total_steps(len(pairs), BATCH, 2, None), []
    running = torch.zeros(2, dtype=torch.float64)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = batches.learning_rate(step, steps, RATE, 0.1, "cosine")
        numbers = batches.step_pairs(step, len(pairs), BATCH, seed=0)
        given, weight = batch_pairs(policy, [pairs[number] for number in numbers], objective)
        if betas is not None:
            with torch.no_grad():
                made = calibrate(Batch(pairs=given, weight=weight, places=[]), objective, running, seed=step)
            running = made.running
            betas.append(made.beta.item())
            given = replace(given, batch_beta=made.beta.float(), kept=made.kept.float())
        loss = (objective.losses(given)["loss"] * weight).sum() / weight.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def batch_pairs(policy: torch.nn.Module, pairs: list[Pair], objective: Objective) -> tuple[Pairs, torch.Tensor]:
    """The whole batch, which sorted losses sort, and its weights."""
    names = ("chosen", "rejected")
    chosen, rejected = (
        torch.stack([plain_logps(policy, pair.prompt, getattr(pair, name), CPU).sum() for pair in pairs])
        for name in names
    )
    refs = [torch.tensor([sum(getattr(pair, name)) for pair in pairs]) for name in ("ref_chosen", "ref_rejected")]
    counts = [torch.tensor([float(len(getattr(pair, name))) for pair in pairs]) for name in names]
    label, margin, weight = (torch.tensor([getattr(p, n) for p in pairs]) for n in ("label", "margin", "weight"))
    given = Pairs(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=refs[0],
        ref_rejected=refs[1],
        chosen_mean=chosen / counts[0],
        rejected_mean=rejected / counts[1],
        chosen_tokens=counts[0],
        rejected_tokens=counts[1],
        label=label,
        margin=MARGIN_SCALE * margin if "margin" in objective.options else 0.0,
    )
    return given, weight


def settings(folder: Path, model: Path, name: str, pairs: list[Pair], **changes: object) -> dict[str, object]:
    folder = folder / name
    folder.mkdir()
    (folder / "pairs.pickle").write_bytes(pickle.dumps(pairs))
    return {
        "name": name,
        "model": str(model),
        "model_name": "test",
        "folder": str(folder),
        "objective": OBJECTIVE,
        "learning_rate": RATE,
        "weight_decay": 0.01,
        "global_batch_size": BATCH,
        "row_tokens": 64,
        "epochs": 2,
        "logging_steps": 1,
        "pairs": str(folder / "pairs.pickle"),
        **changes,
    }


def run_ranks(folder: Path, world: int, runs: list[dict[str, object]], gpu: bool = False) -> dict[str, list[dict]]:
    (folder / "settings.json").write_text(json.dumps(runs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    common |= {} if gpu else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    script = str(PROJECT / "tests" / "train_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(folder / "settings.json"), str(folder / "log.json")],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(output[-3000:] for output in outputs)
    return json.loads((folder / "log.json").read_text())


DYNAMIC = ({"sigmoid": 1.0}, {"beta": 0.1, "beta_alpha": 20.0, "beta_filter": 0.34})  # 2 of 6 pairs are dropped
AOT = ({"aot": 1.0, "aot_unpaired": 0.5}, {"beta": 0.1})


@pytest.fixture(scope="module")
def weighted(pairs) -> list[Pair]:
    rng = random.Random(9)
    return [replace(p, label=rng.random(), margin=0.1 * rng.random(), weight=0.5 + rng.random()) for p in pairs]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, model, pairs, weighted) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("one")
    scored = [replace(pair, margin=8.0 - 3.5) for pair in pairs]
    wrong = [replace(pair, ref_chosen=[value - 0.5 for value in pair.ref_chosen or []]) for pair in pairs]
    runs = [
        settings(folder, model, "zero1-full", pairs, zero_stage=1, save_steps=4),
        settings(folder, model, "zero2-lora", pairs, zero_stage=2, adapter=LORA, save_steps=4),
        settings(folder, model, "narrow-lora", pairs, zero_stage=2, adapter=LORA, row_tokens=8),
        settings(folder, model, "checkpointed-lora", pairs, adapter=LORA, activation_checkpointing=True),
        settings(folder, model, "aot", pairs, objective=AOT),
        settings(folder, model, "aot-narrow", pairs, objective=AOT, row_tokens=8),
        settings(folder, model, "dynamic-narrow", weighted, objective=DYNAMIC, row_tokens=8, save_steps=4),
        settings(folder, model, "dynamic-resumed", weighted, objective=DYNAMIC, row_tokens=8)
        | {"start": str(folder / "dynamic-narrow" / "step-00000004")},
        settings(folder, model, "weighted", weighted, objective=SCORED),
        settings(folder, model, "unread-scores", scored),
        settings(folder, model, "wrong-reference", wrong, zero_stage=2, adapter=LORA),
        settings(folder, model, "selected", pairs, learning_rate=0.3, eval_steps=1, select="eval/loss", patience=2),
    ]
    return run_ranks(folder, 1, runs)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, model, hybrid, sinks, pairs, weighted) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("two")
    impossible = {"margin": float("inf")}
    poisoned = [replace(pair, **impossible) if pair.id == "13" else pair for pair in pairs]
    ruined = [replace(pair, **impossible) for pair in pairs]
    runs = [
        settings(
            folder, model, f"zero{stage}-{mode}", pairs, zero_stage=stage, adapter=LORA if mode == "lora" else None
        )
        for stage in (1, 2, 3)
        for mode in ("full", "lora")
    ]
    runs += [
        settings(folder, model, "aot", pairs, objective=AOT),
        settings(folder, model, "dynamic", weighted, objective=DYNAMIC),
        settings(folder, model, "weighted", weighted, objective=SCORED),
        settings(folder, hybrid, "zero2-hybrid", make_pairs(hybrid), zero_stage=2),
        settings(folder, hybrid, "zero3-hybrid", make_pairs(hybrid), zero_stage=3),
        settings(folder, sinks, "zero3-sinks", make_pairs(sinks), zero_stage=3),
        settings(folder, model, "poisoned", poisoned, objective=SCORED),
        settings(folder, model, "all-poisoned", ruined, objective=SCORED, max_skipped_steps=3),
    ]
    for run in runs:
        run["save_steps"] = 4
    logs = run_ranks(folder, 2, runs)
    assert all(
        (Path(str(run["folder"])) / "policy").is_dir()
        for run in runs
        if run["name"] not in ("all-poisoned", "zero3-hybrid")
    )
    logs["folder"] = str(folder)  # type: ignore[assignment]
    return logs


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, model, pairs, two_ranks) -> dict[str, list[dict]]:
    """One rank goes on from what two ranks had saved at step 4."""
    folder = tmp_path_factory.mktemp("resumed")
    modes = {"zero1-full": {"zero_stage": 1}, "zero2-lora": {"zero_stage": 2, "adapter": LORA}}
    runs = [settings(folder, model, name, pairs, **mode) for name, mode in modes.items()]
    for run in runs:
        shutil.copytree(
            Path(two_ranks["folder"]) / run["name"] / "step-00000004", Path(run["folder"]) / "step-00000004"
        )
    return run_ranks(folder, 1, runs)


def assert_same_course(log: list[dict], expected: list[tuple[float, float]]) -> None:
    course = [(line["loss"], line["grad_norm"]) for line in log if "loss" in line]
    assert len(course) == len(expected)
    for (loss, norm), (expected_loss, expected_norm) in zip(course, expected, strict=True):
        assert loss == pytest.approx(expected_loss, abs=2e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-3)


@pytest.fixture(scope="module")
def plain(model, hybrid, sinks, pairs, weighted) -> dict[str, list[tuple[float, float]]]:
    given, aot = Objective(*OBJECTIVE), Objective(*AOT)
    return {
        "full": plain_run(model, pairs[8:], False, given),
        "lora": plain_run(model, pairs[8:], True, given),
        "hybrid": plain_run(hybrid, make_pairs(hybrid)[8:], False, given),
        "sinks": plain_run(sinks, make_pairs(sinks)[8:], False, given),
        "aot": plain_run(model, pairs[8:], False, aot),
        "weighted": plain_run(model, weighted[8:], False, Objective(*SCORED)),
    }


@pytest.mark.parametrize("name", ["zero1-full", "zero2-lora", "narrow-lora", "checkpointed-lora"])
def test_one_rank_takes_the_course_of_plain_torch(one_rank, plain, name):
    assert_same_course(one_rank[name], plain[name.split("-")[1]])


@pytest.mark.parametrize("name", [f"zero{stage}-{mode}" for stage in (1, 2, 3) for mode in ("full", "lora")])
def test_two_ranks_take_the_course_of_plain_torch(two_ranks, plain, name):
    assert_same_course(two_ranks[name], plain[name.split("-")[1]])


@pytest.mark.parametrize("name", ["zero2-hybrid", "zero3-sinks"])
def test_padded_batches_take_the_course_of_plain_torch(two_ranks, plain, name):
    said = " ".join(line.get("said", "") for line in two_ranks[name])
    assert "takes a slower path: each response is computed after its own prompt" in said
    assert_same_course(two_ranks[name], plain[name.split("-")[1]])


def test_recurrent_layers_under_zero_3_are_refused(two_ranks):
    (line,) = two_ranks["zero3-hybrid"]
    assert "the recurrent layers of Lfm2ForCausalLM read weights that ZeRO-3 keeps on other ranks" in line["refused"]


def test_sorted_losses_sort_the_global_batch_whatever_the_rows_and_ranks(one_rank, two_ranks, plain):
    for log in (one_rank["aot"], one_rank["aot-narrow"], two_ranks["aot"]):
        assert_same_course(log, plain["aot"])


def test_labels_margins_and_weights_are_those_of_the_global_batch(one_rank, two_ranks, plain):
    for log in (one_rank["weighted"], two_ranks["weighted"]):
        assert_same_course(log, plain["weighted"])


def test_beta_dpo_looks_at_the_global_batch_whatever_the_rows_and_ranks(one_rank, two_ranks, model, weighted):
    betas: list[float] = []
    expected = plain_run(model, weighted[8:], False, Objective(*DYNAMIC), betas)
    assert max(betas) - min(betas) > 0.01
    for log in (one_rank["dynamic-narrow"], two_ranks["dynamic"]):
        assert_same_course(log, expected)
        assert [line["beta"] for line in log if "beta" in line] == pytest.approx(betas, rel=1e-4)


def test_beta_dpo_resumes_with_its_running_mean(one_rank):
    whole, resumed = (
        [(line["step"], line["loss"], line["beta"]) for line in one_rank[name] if "beta" in line]
        for name in ("dynamic-narrow", "dynamic-resumed")
    )
    assert resumed == whole[4:]


def test_scores_that_nobody_asked_for_change_nothing_and_are_noted(one_rank, plain):
    assert_same_course(one_rank["unread-scores"], plain["full"])
    assert "the pairs have scores, and the loss ignores them" in one_rank["unread-scores"][0]["said"]


@pytest.mark.parametrize("name", ["zero1-full", "zero2-lora"])
def test_another_number_of_ranks_goes_on_within_rounding(resumed, plain, name):
    course = [(line["step"], line["loss"]) for line in resumed[name] if "loss" in line]
    assert [step for step, _ in course] == [5, 6, 7, 8]
    assert [loss for _, loss in course] == pytest.approx([loss for loss, _ in plain[name.split("-")[1]][4:]], abs=1e-5)


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_the_run_goes_on(two_ranks, plain):
    lines = [line for line in two_ranks["poisoned"] if "loss" in line]
    assert lines[-1]["skipped_steps"] == 2  # the pair is in one step of each epoch
    assert len(lines) == 8 - 2  # a window without a step says nothing
    assert all(line["loss"] < 10 for line in lines)


def test_nothing_but_skipped_steps_stops_the_run_and_names_pairs(two_ranks):
    start, line = two_ranks["all-poisoned"]
    assert start["said"].startswith("the policy starts as the reference: tokens within ")
    assert "3 updates in a row up to step 3 were skipped" in line["refused"]
    assert "pairs: " in line["refused"]


def test_training_stops_without_a_better_one_and_keeps_the_best(one_rank):
    """A learning rate that ruins the model: the first evaluations are the best."""
    seen = {line["step"]: line["eval/loss"] for line in one_rank["selected"] if "eval/loss" in line}
    best = min(seen, key=lambda step: seen[step])
    assert max(seen) == best + 2 < 8
    (said,) = [line["said"] for line in one_rank["selected"] if "stopped" in line.get("said", "")]
    assert said == f"stopped at step {best + 2}: no better eval/loss in 2 evaluations"


def test_a_reference_of_another_model_is_refused_before_the_first_step(one_rank):
    (line,) = one_rank["wrong-reference"]
    assert "the stored reference log-probabilities differ by up to 0.5" in line["refused"]


def test_the_configuration_is_plain():
    config = deepspeed_config(3, "all", "bfloat16", 1.0)
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert config["bf16"]["enabled"]
    assert "offload_optimizer" not in deepspeed_config(2, "none", "float32", 1.0)["zero_optimization"]
