"""KTO under DeepSpeed on one and two ranks, against a plain torch loop that writes out the formula, and against TRL."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engine import BATCH, CPU, RATE, make_model, make_pairs, run_ranks, settings
from tests.support.scoring import make_scorer
from training.models.loading import load_model
from training.objectives.held_out import evaluate_pairs
from training.objectives.metrics import row_loss
from training.objectives.objective import Objective
from training.pairs import batches
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.scoring.logps import plain_logps

pytestmark = pytest.mark.slow
BETA, UP, DOWN = 0.5, 1.5, 0.75
KTO = ({"kto": {"weight": 1.0, "desirable_weight": UP, "undesirable_weight": DOWN}}, {"beta": BETA})
FAST = 5 * RATE  # so that the KL is above 0 within a few steps


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def thumbs(model) -> list[Pair]:
    rng = random.Random(5)
    return [replace(pair, sign=rng.choice([1.0, 1.0, -1.0]), weight=0.5 + rng.random()) for pair in make_pairs(model)]


def plain_step(policy: torch.nn.Module, rows: list[Pair]) -> tuple[torch.Tensor, dict[str, float]]:
    """The weighted mean loss of a batch, by the formula of the paper and TRL; two ordinary passes per row."""
    ratios, others = [], []
    for row in rows:
        ratios.append(plain_logps(policy, row.prompt_ids, row.chosen_ids, CPU).sum() - sum(row.ref_chosen_logps or []))
        with torch.no_grad():
            other = plain_logps(policy, row.prompt_ids, row.rejected_ids, CPU).sum()
            others.append(other - sum(row.ref_rejected_logps or []))
    kl = torch.stack(others).mean().clamp(min=0)
    losses = [
        UP * (1 - torch.sigmoid(BETA * (ratio - kl)))
        if row.sign > 0
        else DOWN * (1 - torch.sigmoid(BETA * (kl - ratio)))
        for ratio, row in zip(ratios, rows, strict=True)
    ]
    weights = torch.tensor([row.weight for row in rows])
    kinds = {1: "chosen", -1: "rejected"}
    rewards = {
        f"rewards/{name}": [BETA * ratio.item() for ratio, row in zip(ratios, rows, strict=True) if row.sign == sign]
        for sign, name in kinds.items()
    }
    metrics = {name: sum(values) / len(values) for name, values in rewards.items() if values}
    loss = (torch.stack(losses) * weights).sum() / weights.sum()
    return loss, {**metrics, "loss": loss.item(), "kl/mismatched": kl.item()}


@pytest.fixture(scope="module")
def plain(model, thumbs) -> list[dict[str, float]]:
    policy, pairs, seen = load_model(model, "float32").train(), thumbs[8:], []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=FAST, weight_decay=0.01)
    steps = batches.total_steps(len(pairs), BATCH, 2, None)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = batches.learning_rate(step, steps, FAST, 0.1, "cosine")
        rows = [pairs[number] for number in batches.step_pairs(step, len(pairs), BATCH, seed=0)]
        loss, metrics = plain_step(policy, rows)
        loss.backward()
        metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        # A prompt and its own answer, whose last token is the second side: the mismatched answer has no gradient pass.
        tokens = float(sum(len(row.prompt_ids) + len(row.chosen_ids) + 1 for row in rows))
        seen.append({**metrics, "tokens": tokens, "pairs": float(len(rows))})
    return seen


def assert_same(log: list[dict], expected: list[dict[str, float]]) -> None:
    course = [line for line in log if "loss" in line]
    assert len(course) == len(expected)
    for line, metrics in zip(course, expected, strict=True):
        for name, value in metrics.items():
            close = {"rel": 1e-3} if name == "grad_norm" else {"abs": 5e-4}
            assert line[name] == pytest.approx(value, **close), (line["step"], name)


def test_any_rows_ranks_and_zero_stage_match_plain_torch_and_a_resumed_run_repeats_it(
    tmp_path_factory, model, thumbs, plain
):
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    common = {"objective": KTO, "learning_rate": FAST, "save_steps": 4}
    runs = [
        settings(one, model, "kto", thumbs, **common),
        settings(one, model, "narrow", thumbs, **common, row_tokens=8),
        settings(one, model, "resumed", thumbs, **common) | {"start": str(one / "kto" / "step-00000004")},
        settings(one, model, "apo", thumbs, objective=({"apo_zero_unpaired": 1.0}, {"beta": BETA})),
        settings(one, model, "pairs", [replace(pair, sign=0.0) for pair in thumbs], objective=KTO),
    ]
    logs = run_ranks(one, 1, runs)
    wide = settings(two, model, "wide", thumbs, **common, zero_stage=3, held_out={"a": 3, "b": 5})
    others = run_ranks(two, 2, [wide])
    assert max(step["kl/mismatched"] for step in plain) > 0.01
    assert min(step["kl/mismatched"] for step in plain) == 0.0  # clamped
    for log in (logs["kto"], logs["narrow"], others["wide"]):
        assert_same(log, plain)
    first, again = ([line for line in logs[name] if "loss" in line] for name in ("kto", "resumed"))
    names = ("loss", "grad_norm", "kl/mismatched")
    assert [[line[n] for n in names] for line in again] == [[line[n] for n in names] for line in first[4:]]
    assert not any("kl/mismatched" in line for line in logs["apo"])
    assert "the data has pairs: set prepare.format to unpaired" in logs["pairs"][0]["refused"]
    ends = [next(line for line in log if "eval/loss" in line) for log in (logs["kto"], others["wide"])]
    for name in ("eval/rewards/chosen", "eval/rewards/rejected", "eval/rewards/margins"):  # the KL is each source's own
        assert ends[0][name] == pytest.approx(ends[1][name], abs=1e-4)
    assert {"eval/a/rewards/accuracies", "eval/b/loss"} <= ends[1].keys()


def test_held_out_rows_are_one_batch_for_any_packing(model, thumbs):
    policy = load_model(model, "float32")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    _, expected = plain_step(policy, thumbs)
    scorer = make_scorer(policy, thumbs, CPU)
    for row_tokens in (8, 512):
        found = evaluate_pairs(scorer, Objective(*KTO), thumbs, row_tokens, CPU)
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("noisy", ["policy", "reference"])
def test_loss_kl_rewards_and_gradients_are_those_of_trl(model, tmp_path, noisy):
    """The same batch through TRL's own trainer: collator, mismatched completions, KL, losses."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(61)}
    plain_tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    plain_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain_tokenizer, eos_token="1", pad_token="2")
    rng = random.Random(2)

    def text() -> str:
        return " ".join(str(rng.randrange(3, 61)) for _ in range(rng.randint(2, 9)))

    rows = [{"prompt": text(), "completion": f" {text()}", "label": rng.random() < 0.6} for _ in range(8)]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (policy if noisy == "policy" else reference).parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    config = trl.KTOConfig(
        output_dir=str(tmp_path),
        beta=BETA,
        desirable_weight=UP,
        undesirable_weight=DOWN,
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    trainer = trl.KTOTrainer(
        model=policy,
        ref_model=reference,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    (batch,) = list(trainer.get_train_dataloader())
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, batch, False)
    loss.backward()
    pairs = []
    for n, row in enumerate(trainer.train_dataset):
        own, other = row["completion_ids"], row["KL_completion_ids"]
        with torch.no_grad():
            own_logps, other_logps = (
                plain_logps(reference, row["prompt_ids"], ids, CPU).tolist() for ids in (own, other)
            )
        stored = {"ref_chosen_logps": own_logps, "ref_rejected_logps": other_logps}
        masks = [1] * len(own), [1] * len(other)
        pairs.append(Pair(str(n), row["prompt_ids"], own, other, *masks, sign=1.0 if row["label"] else -1.0, **stored))
    ours = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ours.load_state_dict(policy.state_dict())
    packed = build_row(pairs, range(len(pairs)))
    losses, values, _ = row_loss(make_scorer(ours, pairs, CPU), Objective(*KTO), packed)
    losses.mean().backward()
    logged = {name: found[-1] for name, found in trainer._metrics["train"].items()}
    desirable = values["desirable"].sum()
    assert 0 < desirable < len(rows)
    assert (logged["kl"] == 0.0) == (noisy == "policy")  # noise makes every text less likely: the mean is below 0
    assert losses.mean().item() == pytest.approx(loss.item(), abs=1e-6)
    assert values["kl/mismatched"][0].item() == pytest.approx(logged["kl"], abs=1e-4)
    for kind, count in (("chosen", desirable), ("rejected", len(rows) - desirable)):
        for name in (f"rewards/{kind}", f"logps/{kind}"):
            assert (values[name].sum() / count).item() == pytest.approx(logged[name], abs=1e-4), name
    for (name, parameter), other in zip(ours.named_parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
