"""Training under DeepSpeed, one and two ranks, ZeRO 1, 2 and 3, against a plain torch loop without packing."""

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import (
    GptOssConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
)

from tests.models.test_architectures import LINEAR
from tests.support.engine import (
    AOT,
    CLIP,
    COMPACT,
    DORA,
    EVALUATED,
    FAST,
    HEADS,
    LORA,
    LORA_PLUS,
    OBJECTIVE,
    OPTIONS,
    PEAK,
    PISSA,
    RECOMPUTED,
    SAVE,
    SAVED,
    SAVED_STEP,
    SAVED_VARIANTS,
    SCORED,
    SHAPE,
    STEPS,
    TRAINED,
    VARIANTS,
    evaluated,
    make_model,
    make_pairs,
    plain_run,
    run_ranks,
    save,
    settings,
)
from tests.support.settings import make_settings
from training.models.loading import load_model
from training.objectives.objective import Objective
from training.pairs import batches
from training.pairs.pair import Pair
from training.trainer import loop
from training.trainer.engine import count_nonzero, deepspeed_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pairs(model) -> list[Pair]:
    return make_pairs(model, TRAINED)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    """A model with a gated delta net, which reads the tokens of a row in order."""
    layers = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, **LINEAR}
    return save(tmp_path_factory.mktemp("hybrid"), Qwen3_5TextConfig(**SHAPE, **HEADS, **layers))


@pytest.fixture(scope="module")
def sinks(tmp_path_factory) -> Path:
    """A model whose attention packed rows do not support, and whose weights ZeRO-3 can gather."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return save(tmp_path_factory.mktemp("sinks"), GptOssConfig(**SHAPE, **HEADS, **experts))


@pytest.fixture(scope="module")
def weighted(pairs) -> list[Pair]:
    rng = random.Random(9)
    return [replace(p, label=rng.random(), margin=0.1 * rng.random(), weight=0.5 + rng.random()) for p in pairs]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, model) -> dict[str, Path]:
    """The model of each variant of LoRA: one with tied embeddings for the embeddings that are trained."""
    tied = save(tmp_path_factory.mktemp("tied"), LlamaConfig(**SHAPE, **HEADS, tie_word_embeddings=True))
    return {name: tied if name == "saved-modules" else model for name in VARIANTS}


@pytest.fixture(scope="module")
def pairs_of(pairs, model_of) -> dict[str, list[Pair]]:
    return {name: make_pairs(model_of[name], TRAINED) if name == "saved-modules" else pairs for name in VARIANTS}


def case(folder: Path, model: Path, name: str, pairs: list[Pair], **changes: object) -> dict[str, object]:
    return settings(folder, model, name, pairs, **{"learning_rate": FAST, **changes})


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, model, pairs, weighted, model_of, pairs_of) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("one")
    scored = [replace(pair, margin=8.0 - 3.5) for pair in pairs]
    wrong = [replace(pair, ref_chosen_logps=[value - 0.5 for value in pair.ref_chosen_logps or []]) for pair in pairs]
    saved, narrow = {"save_steps": SAVE}, {"row_tokens": 8}
    runs = [
        case(folder, model, "unread-scores-full", scored),
        case(folder, model, "narrow-lora", pairs, zero_stage=2, adapter=LORA, **narrow, **saved),
        case(folder, model, "dora", pairs, adapter=DORA, **RECOMPUTED),
        case(folder, model_of["saved-modules"], "saved-modules", pairs_of["saved-modules"], adapter=SAVED),
        case(folder, model, "offload-all", pairs, offload="all", zero_stage=3),
        case(folder, model, "adamw_8bit", pairs, optimizer="adamw_8bit", zero_stage=2, **saved),
        case(folder, model, "wrong-reference", wrong, zero_stage=2, adapter=LORA),
        case(folder, model, "selected", pairs, learning_rate=0.3, eval_steps=1, select="eval/loss", patience=2),
    ]
    return {**run_ranks(folder, 1, runs), "folder": folder}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, model, hybrid, sinks, pairs, weighted) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("two")
    impossible = {"margin": float("inf")}
    nonfinite = [replace(pair, **impossible) if pair.id == "13" else pair for pair in pairs]
    all_nonfinite = [replace(pair, **impossible) for pair in pairs]
    runs = [
        case(folder, model, "zero1-full", pairs, zero_stage=1),
        case(folder, model, "zero2-full", pairs, zero_stage=2),
        case(folder, model, "zero3-full-chunked", pairs, zero_stage=3, activation_checkpointing=True)
        | {"chunk_bytes": 5 * 61 * 4},
        case(folder, model, "zero2-pissa", pairs, zero_stage=2, adapter=PISSA),
        case(folder, model, "zero3-lora-plus", pairs, zero_stage=3, adapter=LORA_PLUS),
        case(folder, model, "adamw_8bit", pairs, optimizer="adamw_8bit", zero_stage=3),
        case(folder, model, "aot", pairs, objective=AOT, row_tokens=8),
        case(folder, model, "options", weighted, objective=SCORED, **OPTIONS, held_out={"a": 3, "b": 5}),
        case(folder, model, "alarmed", pairs, learning_rate=0.1, kl_limit=0.05, stop_on_alarm=True),
        case(folder, hybrid, "zero3-hybrid", make_pairs(hybrid, TRAINED), zero_stage=3, activation_checkpointing=True),
        case(folder, sinks, "zero3-sinks", make_pairs(sinks, TRAINED), zero_stage=3),
        case(folder, model, "nonfinite", nonfinite, objective=SCORED),
        case(folder, model, "all-nonfinite", all_nonfinite, objective=SCORED, max_skipped_steps=3),
    ]
    for run in runs:
        run["save_steps"] = SAVE
    logs = run_ranks(folder, 2, runs)
    assert all((Path(str(run["folder"])) / "policy").is_dir() for run in runs if run["name"] != "all-nonfinite")
    return {**logs, "folder": folder}


@pytest.fixture(scope="module")
def two_ranks_more(tmp_path_factory, model, hybrid, pairs) -> dict[str, list[dict]]:
    """Other combinations of what `two_ranks` contains."""
    folder = tmp_path_factory.mktemp("more")
    runs = [
        *(case(folder, model, f"zero{n}-lora", pairs, zero_stage=n, adapter=LORA) for n in (1, 2, 3)),
        case(folder, model, "zero3-full", pairs, zero_stage=3),
        case(folder, model, "adamw_bf16", pairs, optimizer="adamw_bf16", zero_stage=3),
        case(folder, hybrid, "zero2-hybrid", make_pairs(hybrid, TRAINED), zero_stage=2),
    ]
    return run_ranks(folder, 2, runs)


MOVES = {  # (saved run, its ranks, ranks of the resumed run, its settings)
    "zero1-to-2-full": ("zero1-full", 2, 1, {"zero_stage": 2}),
    "zero3-to-2-full": ("zero3-full-chunked", 2, 1, {"zero_stage": 2}),
    "more-ranks-lora": ("narrow-lora", 1, 2, {"zero_stage": 2, "adapter": LORA}),
    "more-ranks-zero2-to-3-lora": ("narrow-lora", 1, 2, {"zero_stage": 3, "adapter": LORA}),
    "pissa": ("zero2-pissa", 2, 1, {"zero_stage": 2, "adapter": PISSA}),
    "lora-plus": ("zero3-lora-plus", 2, 1, {"zero_stage": 3, "adapter": LORA_PLUS}),
    "more-ranks-adamw_8bit": ("adamw_8bit", 1, 2, {"optimizer": "adamw_8bit", "zero_stage": 2}),
}
OTHER_ZERO = "{} workers under ZeRO-{} with tensor_parallel 1: DeepSpeed cannot convert between ZeRO-3 and"
REFUSED = {
    "zero3-to-2-full": OTHER_ZERO.format(1, 2),
    "more-ranks-zero2-to-3-lora": OTHER_ZERO.format(2, 3),
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, model, pairs, one_rank, two_ranks) -> dict[str, list[dict]]:
    """Runs with other ranks or another ZeRO stage that resume from the middle."""
    logs: dict[str, list[dict]] = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp("resumed")
        runs = []
        for name, (saved, ranks, onward, mode) in MOVES.items():
            if onward == world:
                runs.append(case(folder, model, name, pairs, **mode))
                source = (one_rank if ranks == 1 else two_ranks)["folder"] / saved / SAVED_STEP
                shutil.copytree(source, folder / name / SAVED_STEP)
        logs |= run_ranks(folder, world, runs)
    return logs


def assert_same_metrics(log: list[dict], expected: list[dict[str, float]], without: str = "") -> None:
    course = [line for line in log if "loss" in line]
    assert len(course) == len(expected)
    for line, metrics in zip(course, expected, strict=True):
        for name, value in metrics.items():
            if name == without:
                assert name not in line
                continue
            close = {"rel": 1e-3} if name == "grad_norm" else {"abs": 2e-5}
            assert line[name] == pytest.approx(value, **close), (line["step"], name)
        rate = line["tokens_per_second"] / line["pairs_per_second"]
        assert rate == pytest.approx(metrics["tokens"] / metrics["pairs"])


def loss_and_norm(course: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: step[name] for name in ("loss", "grad_norm", "pairs", "tokens")} for step in course]


@pytest.fixture(scope="module")
def plain(model, hybrid, sinks, pairs, weighted, model_of, pairs_of) -> dict[str, list[dict[str, float]]]:
    given, fast = Objective(*OBJECTIVE), schedule()
    linear = [PEAK * part for part in (0.5, 1.0, 1.0, 0.5)]
    return {
        "full": plain_run(model, pairs[8:], given, None, fast),
        "lora": plain_run(model, pairs[8:], given, LORA, fast),
        "lora-plus": plain_run(model, pairs[8:], given, LORA_PLUS, fast),
        **{name: plain_run(model_of[name], pairs_of[name][8:], given, VARIANTS[name], fast) for name in VARIANTS},
        "hybrid": plain_run(hybrid, make_pairs(hybrid, TRAINED)[8:], given, None, fast),
        "sinks": plain_run(sinks, make_pairs(sinks, TRAINED)[8:], given, None, fast),
        "aot": plain_run(model, pairs[8:], Objective(*AOT), None, fast),
        "options": plain_run(model, weighted[8:], Objective(*SCORED), rates=linear, clip=CLIP),
    }


def schedule() -> list[float]:
    return [batches.learning_rate(step, STEPS, FAST, 0.1, "cosine") for step in range(STEPS)]


@pytest.mark.parametrize("name", ["unread-scores-full", "narrow-lora"])
def test_one_rank_matches_plain_torch(one_rank, plain, name):
    assert_same_metrics(one_rank[name], plain[name.rsplit("-", 1)[1]])


def test_scores_that_the_loss_ignores_are_reported(one_rank):
    assert "the pairs have scores, but the loss ignores them" in one_rank["unread-scores-full"][0]["said"]


@pytest.mark.parametrize("name", ["zero1-full", "zero2-full"])
def test_two_ranks_match_plain_torch(two_ranks, plain, name):
    assert_same_metrics(two_ranks[name], plain["full"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["zero1-lora", "zero2-lora", "zero3-lora", "zero3-full"])
def test_two_ranks_match_plain_torch_in_other_combinations(two_ranks_more, plain, name):
    assert_same_metrics(two_ranks_more[name], plain[name.split("-")[1]])


def test_a_sharded_head_in_chunks_waits_for_no_rank_with_fewer_targets(two_ranks, plain):
    """Five targets a chunk: the ranks' rows differ in the number of chunks, and each chunk gathers the weights."""
    assert_same_metrics(two_ranks["zero3-full-chunked"], plain["full"])


@pytest.mark.parametrize("name", ["zero3-hybrid", "zero3-sinks"])
def test_recurrent_layers_and_padded_batches_match_plain_torch(two_ranks, plain, name):
    said = " ".join(line.get("said", "") for line in two_ranks[name])
    is_padded = "takes a slower path: each response is computed after its own prompt" in said
    assert is_padded == (name == "zero3-sinks")
    assert_same_metrics(two_ranks[name], loss_and_norm(plain[name.split("-")[1]]))


@pytest.mark.exhaustive
def test_recurrent_layers_match_plain_torch_without_sharding(two_ranks_more, plain):
    assert_same_metrics(two_ranks_more["zero2-hybrid"], loss_and_norm(plain["hybrid"]))


@pytest.mark.parametrize("name", [*SAVED_VARIANTS, "zero3-lora-plus"])
def test_lora_variants_match_peft(one_rank, two_ranks, plain, name):
    """That of DoRA recomputes activations."""
    variant = variant_of(name)
    log = (one_rank if name in VARIANTS else two_ranks)[name]
    assert_same_metrics(log, plain[variant])
    if variant != "dora":
        assert losses_of(log)[-1] != pytest.approx(losses_of(plain["lora"])[-1], abs=1e-4)  # the option has an effect


def variant_of(name: str) -> str:
    return name.removeprefix("zero2-").removeprefix("zero3-")


def test_offloaded_states_match_plain_torch(one_rank, plain):
    """DeepSpeed does not expose offloaded gradients, so their zeros are not counted."""
    assert_same_metrics(one_rank["offload-all"], plain["full"], without="num_zeros_in_grad")


@pytest.mark.exhaustive  # the test above; on two ranks: tests/distributed/test_tensor_parallel_training.py
def test_an_offloaded_optimizer_matches_plain_torch(tmp_path, model, pairs, plain):
    logs = run_ranks(tmp_path, 1, [case(tmp_path, model, "run", pairs, offload="optimizer")])
    assert_same_metrics(logs["run"], plain["full"], without="num_zeros_in_grad")


def losses_of(log: list[dict]) -> list[float]:
    return [line["loss"] for line in log if "loss" in line]


def test_compact_moments_train_like_those_in_float32(one_rank, resumed, plain):
    assert_compact(one_rank["adamw_8bit"], resumed["more-ranks-adamw_8bit"], plain, "adamw_8bit")


@pytest.mark.exhaustive
def test_compact_moments_in_bfloat16_train_like_those_in_float32(tmp_path, model, pairs, plain):
    changes = {"optimizer": "adamw_bf16", "zero_stage": 2}
    one = run_ranks(tmp_path, 1, [case(tmp_path, model, "one", pairs, save_steps=SAVE, **changes)])["one"]
    resumed = case(tmp_path, model, "two", pairs, **changes)
    shutil.copytree(tmp_path / "one" / SAVED_STEP, tmp_path / "two" / SAVED_STEP)
    assert_compact(one, run_ranks(tmp_path, 2, [resumed])["two"], plain, "adamw_bf16")


def assert_compact(one: list[dict], resumed: list[dict], plain: dict[str, list[dict[str, float]]], name: str) -> None:
    assert_near(one, losses_of(plain["full"]), name)
    assert_near(resumed, losses_of(plain["full"])[SAVE:], name)
    # Ranks round the same values: their blocks of 256 values begin elsewhere.
    assert losses_of(resumed) == pytest.approx(losses_of(one)[SAVE:], abs=1e-3)


def test_sharded_moments_in_8_bits_train_like_those_in_float32(two_ranks, plain):
    assert_near(two_ranks["adamw_8bit"], losses_of(plain["full"]), "adamw_8bit")


@pytest.mark.exhaustive
def test_sharded_moments_in_bfloat16_train_like_those_in_float32(two_ranks_more, plain):
    assert_near(two_ranks_more["adamw_bf16"], losses_of(plain["full"]), "adamw_bf16")


def assert_near(log: list[dict], expected: list[float], name: str) -> None:
    course = losses_of(log)
    assert course == pytest.approx(expected, abs=COMPACT[name])
    assert course[-1] != pytest.approx(expected[-1], abs=1e-9)  # another optimizer ran


def test_sorted_losses_sort_the_global_batch_of_all_rows_and_ranks(two_ranks, plain):
    assert_same_metrics(two_ranks["aot"], plain["aot"])


def test_labels_margins_weights_and_schedule_are_those_of_the_settings_and_the_global_batch(two_ranks, plain):
    """4 steps, half of them warm-up, then linear; every norm is above the clipping limit."""
    assert_same_metrics(two_ranks["options"], plain["options"])
    assert min(step["grad_norm"] for step in plain["options"]) > CLIP


def test_every_source_is_evaluated_and_the_mean_is_over_all_pairs(two_ranks, weighted):
    """Expected values by plain passes of the published policy: losses weighted by pair, the rest by count."""
    policy = load_model(two_ranks["folder"] / "options" / "policy", "float32")
    sets = {"eval/a/": weighted[:3], "eval/b/": weighted[3:8], "eval/": weighted[:8]}
    (line,) = [line for line in two_ranks["options"] if "eval/loss" in line]
    for prefix, held_out in sets.items():
        expected = evaluated(policy, held_out, Objective(*SCORED))
        assert {name: line[f"{prefix}{name}"] for name in EVALUATED} == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("name", [n for n in MOVES if n not in REFUSED and not n.endswith("adamw_8bit")])
def test_another_number_of_ranks_or_zero_stage_resumes_within_rounding(resumed, plain, name):
    course = [line for line in resumed[name] if "loss" in line]
    assert [line["step"] for line in course] == list(range(SAVE + 1, STEPS + 1))
    assert_same_metrics(course, plain[name if name in plain else name.rsplit("-", 1)[1]][SAVE:])


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_that_deepspeed_cannot_convert_is_rejected_on_all_ranks(resumed, name):
    *said, line = resumed[name]
    assert REFUSED[name] in line["refused"]
    assert not any("loss" in other for other in said)


def test_all_ranks_skip_a_nonfinite_step_and_the_run_continues(two_ranks, plain):
    lines = [line for line in two_ranks["nonfinite"] if "loss" in line]
    assert lines[-1]["skipped_steps"] == 2  # the pair is in one step of each epoch
    assert len(lines) == STEPS - 2  # a window without an update logs nothing
    assert all(line["loss"] < 10 for line in lines)


def test_too_many_skipped_steps_stop_the_run_and_name_the_pairs(two_ranks):
    start, line = two_ranks["all-nonfinite"]
    assert start["said"].startswith("the policy starts as the reference: tokens within ")
    assert "3 updates in a row up to step 3 were skipped" in line["refused"]
    assert "pairs: " in line["refused"]


@pytest.mark.parametrize("name", SAVED_VARIANTS)
def test_a_saved_lora_variant_equals_the_trained_policy(one_rank, two_ranks, model_of, pairs_of, name):
    """peft reads it as an adapter and merged: both reproduce the last logged metrics."""
    variant, runs = variant_of(name), one_rank if name in VARIANTS else two_ranks
    (line,) = [line for line in runs[name] if "eval/loss" in line]
    policy = PeftModel.from_pretrained(load_model(model_of[variant], "float32"), runs["folder"] / name / "policy")
    for read in (policy.eval(), policy.merge_and_unload()):
        expected = evaluated(read, pairs_of[variant][:8], Objective(*OBJECTIVE))
        assert {key: line[f"eval/{key}"] for key in EVALUATED} == pytest.approx(expected, abs=2e-5)


def test_an_alarm_is_logged_and_reported_and_stops_all_ranks(two_ranks):
    log = two_ranks["alarmed"]
    (alarm,) = [line for line in log if "alarms/kl" in line]
    assert alarm["alarms/kl"] == 1.0
    assert alarm["kl"] > 0.05
    assert all(line["kl"] <= 0.05 for line in log if line.get("step", 99) < alarm["step"])
    said = [line["said"] for line in log if "said" in line][1:]
    assert said[0].startswith(f"alarm at step {alarm['step']}: kl ")
    assert said[1:] == [f"stopped at step {alarm['step']}: alarm kl"]
    assert max(line.get("step", 0) for line in log) == alarm["step"] < STEPS
    assert any("eval/loss" in line for line in log)  # the published policy was evaluated


def test_training_stops_without_improvement_and_publishes_the_best_weights(one_rank, pairs):
    """The learning rate is so high that the first evaluations are the best."""
    seen = {line["step"]: line["eval/loss"] for line in one_rank["selected"] if "eval/loss" in line}
    best = min(seen, key=lambda step: seen[step])
    assert max(seen) == best + 2 < STEPS
    (said,) = [line["said"] for line in one_rank["selected"] if "stopped" in line.get("said", "")]
    assert said == f"stopped at step {best + 2}: no better eval/loss in 2 evaluations"
    policy = load_model(one_rank["folder"] / "selected" / "policy", "float32")
    loss = evaluated(policy, pairs[:8], Objective(*OBJECTIVE))["loss"]
    assert loss == pytest.approx(seen[best], abs=2e-5)
    assert loss != pytest.approx(seen[best + 2], abs=1e-2)  # the last step's weights


def test_a_reference_of_another_model_is_rejected_before_the_first_step(one_rank):
    said, line = one_rank["wrong-reference"]
    assert "the stored reference log-probabilities differ by up to 0.5" in line["refused"]
    assert re.match(r"LoRA of rank 3: [\d,]+ trained parameters, .* on q_proj, .*; frozen: embed_tokens", said["said"])


def test_zeros_of_a_large_gradient_are_counted_exactly():
    """Twice 2^24 nonzero elements (one in memory), and three zeros: float32 counts to 2^24."""
    many, few = torch.ones(1, dtype=torch.bfloat16).expand(2 * 2**24), torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert count_nonzero([many, few]).item() == 2 * 2**24 + 1


def test_the_deepspeed_configuration_follows_the_settings():
    config = deepspeed_config(3, "all", "bfloat16", 1.0)
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert config["bf16"]["enabled"]
    assert "offload_optimizer" not in deepspeed_config(2, "none", "float32", 1.0)["zero_optimization"]


@pytest.mark.parametrize(("eval_steps", "interval"), [(None, None), (7, 7), ("epoch", 5), (0.25, 4), (0.01, 1)])
def test_eval_steps_sets_the_evaluation_interval(eval_steps, interval):
    """80 pairs in batches of 16 are 5 steps per epoch; a quarter of 15 steps is 3.75."""
    given = make_settings(model="", folder="", global_batch_size=16, eval_steps=eval_steps)
    assert loop.eval_interval(given, pairs=80, steps=15) == interval
