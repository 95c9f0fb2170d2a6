"""The load-balancing loss of mixtures of experts: transformers' own numbers on the same tokens, once a pass."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.support.engine import BATCH, CPU, OBJECTIVE, RATE, batch_pairs, make_pairs, run_ranks, settings
from tests.support.scoring import make_scorer
from training.models.loading import load_model
from training.models.routers import LoadBalancingLoss
from training.objectives.objective import Objective
from training.pairs import batches
from training.pairs.packing import PackedRow, build_row
from training.pairs.pair import Pair
from training.scoring.logps import Scorer, row_logps

SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "mixtral": MixtralConfig(**SHAPE, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, **HEADS, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}
PAIRS = [
    Pair("0", [5, 6, 7], [8, 9, 10, 11], [8, 12, 13], [1] * 4, [1] * 3),
    Pair("1", [20, 21, 22, 23, 24], [30, 31], [32, 33, 34, 35], [1] * 2, [1] * 4),
]


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # routers with an opinion
    return model.train()


def balanced(model: torch.nn.Module, how: str | None = None) -> tuple[Scorer, PackedRow]:
    scorer = make_scorer(model, PAIRS, CPU)
    assert scorer.path == "fused"
    if how:
        scorer.path = how
        if how in ("padded", "plain"):
            model.set_attn_implementation("sdpa")
    scorer.load_balance = LoadBalancingLoss(model)
    return scorer, build_row(PAIRS, range(len(PAIRS)))


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("how", ["fused", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_transformers_on_the_same_tokens(name, how):
    model = make(name)
    scorer, row = balanced(model, how)
    ours = row_logps(scorer, row).balance_loss
    found = gradients(model, ours)
    scorer.load_balance.formula = None  # transformers alone
    model.base_model._forward_pre_hooks.clear()
    theirs = model(**scorer._inputs(row), output_router_logits=True).aux_loss
    expected = gradients(model, theirs)
    torch.testing.assert_close(ours, theirs)
    routers = [name for name in expected if name.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == 2
    assert all(expected[name].abs().max() > 1e-4 for name in routers)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_row_balances_each_token_of_plain_passes_once(name):
    """Prompt and chosen of one pass, and of the other what is rejected's own."""
    model = make(name)
    found = row_logps(*balanced(model)).balance_loss
    model.set_attn_implementation("sdpa")
    layers: list[list[torch.Tensor]] = [[], []]
    for pair in PAIRS:
        first = len(pair.prompt_ids) + pair.shared_prefix
        for response, start in ((pair.chosen_ids, 0), (pair.rejected_ids, first)):
            ids = torch.tensor([[*pair.prompt_ids, *response]])
            for layer, logits in enumerate(model(input_ids=ids, output_router_logits=True).router_logits):
                layers[layer].append(logits[start:])
    expected = load_balancing_loss_func(tuple(map(torch.cat, layers)), 4, 2)
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("how", ["padded", "plain"])
def test_padding_has_no_part_in_the_balance(how):
    """Every response after its own prompt, so that a prompt counts twice; padding never does."""
    model = make("mixtral")
    found = row_logps(*balanced(model, how)).balance_loss
    model.base_model._forward_pre_hooks.clear()
    layers: list[list[torch.Tensor]] = [[], []]
    for pair in PAIRS:
        for response in (pair.chosen_ids, pair.rejected_ids):
            ids = torch.tensor([[*pair.prompt_ids, *response]])
            for layer, logits in enumerate(model(input_ids=ids, output_router_logits=True).router_logits):
                layers[layer].append(logits)
    expected = load_balancing_loss_func(tuple(map(torch.cat, layers)), 4, 2)
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_pass_without_gradients_records_nothing():
    scorer, row = balanced(make("mixtral"))
    with torch.no_grad():
        assert row_logps(scorer, row).balance_loss is None
    assert scorer.load_balance.passes == []


def test_activation_checkpointing_records_each_router_once():
    model = make("mixtral")
    scorer, row = balanced(model)
    before = row_logps(scorer, row).balance_loss
    expected = gradients(model, before)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kept: list[int] = []
    formula = scorer.load_balance.formula
    scorer.load_balance.formula = lambda logits, *rest: kept.append(len(logits)) or formula(logits, *rest)
    calls = []
    router = next(m for name, m in model.named_modules() if name.endswith(("gate", "router")))
    router.register_forward_hook(lambda *_: calls.append(1))
    after = row_logps(scorer, row).balance_loss
    found = gradients(model, after)
    assert sum(calls) == 2  # recomputed in the backward pass
    assert kept == [2]  # and still one entry for each of the two layers
    assert scorer.load_balance.passes == []
    assert after.item() == before.item()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_a_model_without_routers_is_an_error_that_names_the_key():
    dense = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, **HEADS))
    with pytest.raises(
        ValueError, match=r"train\.router_aux_loss_coef: transformers has no load-balancing loss for LlamaForCausalLM"
    ):
        LoadBalancingLoss(dense)


@pytest.mark.slow
def test_training_adds_each_rows_share(tmp_path):
    """One row a step: the gradient of the pairs' mean loss plus coef times transformers' loss of the row."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(deepcopy(CONFIGS["mixtral"])).save_pretrained(tmp_path / "model")
    pairs = make_pairs(tmp_path / "model")
    common = {"router_aux_loss_coef": 2.0, "row_tokens": 512, "max_steps": 3}
    runs = [settings(tmp_path, tmp_path / "model", f"zero{s}", pairs, zero_stage=s, **common) for s in (1, 3)]
    narrow = settings(tmp_path, tmp_path / "model", "narrow", pairs, **{**common, "row_tokens": 32})
    logs = run_ranks(tmp_path, 1, [*runs, narrow])
    expected = plain_run(tmp_path / "model", pairs[8:], 2.0, 3)
    for name in ("zero1", "zero3"):
        lines = [line for line in logs[name] if "loss" in line]
        found = [(line["loss"], line["aux_loss"], line["grad_norm"]) for line in lines]
        assert found == [pytest.approx(values, rel=1e-3) for values in expected]
    assert "eval/aux_loss" not in logs["zero1"][-1]
    # Several rows: shares of the step's tokens, each with a balance of its own, which is never better than the whole's.
    first = next(line for line in logs["narrow"] if "loss" in line)
    assert first["loss"] == pytest.approx(expected[0][0], rel=1e-5)
    assert 1.0 <= expected[0][1] / 2 <= first["aux_loss"] / 2 < 1.5


def plain_run(model: Path, pairs: list[Pair], coef: float, steps: int) -> list[tuple[float, float, float]]:
    """(preference loss, load-balancing loss, gradient norm) of each step."""
    policy = load_model(model, "float32").train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.01)
    seen = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = batches.learning_rate(step, steps, RATE, 0.1, "cosine")
        batch = [pairs[number] for number in batches.step_pairs(step, len(pairs), BATCH, seed=0)]
        loss = batch_loss(policy, batch)
        layers: list[list[torch.Tensor]] = [[], []]
        for pair in batch:
            for response, start in (
                (pair.chosen_ids, 0),
                (pair.rejected_ids, len(pair.prompt_ids) + pair.shared_prefix),
            ):
                ids = torch.tensor([[*pair.prompt_ids, *response]])
                for layer, logits in enumerate(policy(input_ids=ids, output_router_logits=True).router_logits):
                    layers[layer].append(logits[start:])
        balance = load_balancing_loss_func(tuple(map(torch.cat, layers)), 4, 2)
        (loss + coef * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), balance.item(), norm.item()))
    return seen


def batch_loss(policy: torch.nn.Module, pairs: list[Pair]) -> torch.Tensor:
    objective = Objective(*OBJECTIVE)
    return objective.losses(batch_pairs(policy, pairs, objective)[0])["loss"].mean()
