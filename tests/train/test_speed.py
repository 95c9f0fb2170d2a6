"""Throughput and MFU against hand-computed values and torch's own counter of FLOPs, with a fake clock."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from tests.support.scoring import make_scorer
from training.models.adapters import add_adapter
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.scoring.logps import row_logps
from training.trainer import speed
from training.trainer.speed import Speed, model_flops
from training.trainer.step_loader import StepBatch

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(speed.time, "monotonic", lambda: time.now)
    return time


SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYER = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24  # weights of queries and output, keys and values, and the MLP


def model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, tie_word_embeddings=tied))


def batch(tokens: int = 0, targets: int = 0, attended_tokens: int = 0) -> StepBatch:
    return StepBatch(0, [], 0.0, tokens, targets, attended_tokens, [])


def test_rates_exclude_only_pauses(clock):
    rates = Speed(model(), CPU, world=1, before={})
    clock.now += 4.0
    with rates.paused():
        clock.now += 1000.0  # an evaluation in the middle of a logging window
    clock.now += 6.0
    assert rates.since({"tokens": 500.0, "pairs": 20.0}) == {"tokens_per_second": 50.0, "pairs_per_second": 2.0}
    clock.now += 1.0
    assert rates.since({"tokens": 500.0, "pairs": 20.0})["tokens_per_second"] == 500.0


def test_a_resumed_run_does_not_count_tokens_of_the_previous_process(clock):
    rates = Speed(model(), CPU, world=1, before={"tokens": 400.0, "pairs": 15.0, "loss": 9.0})
    clock.now += 10.0
    assert rates.since({"tokens": 500.0, "pairs": 20.0}) == {"tokens_per_second": 10.0, "pairs_per_second": 0.5}
    clock.now += 10.0
    assert rates.since({"tokens": 500.0, "pairs": 20.0})["tokens_per_second"] == 50.0


def test_mfu_is_relative_to_each_peak_and_to_the_steps_since_the_last_call(clock):
    rates = Speed(model(), CPU, world=2, before={})
    rates.peaks = {"mfu": 1e6, "mfu_datasheet": 2e6}
    for _ in range(2):
        rates.count(batch(tokens=100))
        clock.now += 2.0
        flops = 6 * 2 * LAYER * 100
        values = rates.since({"tokens": 100.0, "pairs": 8.0})
        assert values["mfu"] == pytest.approx(flops / 2.0 / 2 / 1e6)
        assert values["mfu_datasheet"] == pytest.approx(flops / 2.0 / 2 / 2e6)


@pytest.mark.parametrize("tied", [False, True])
def test_matrix_products_are_those_that_torch_counts(tied):
    """A pass over a packed row, forward and backward: torch's counter and ours agree, without attention."""
    policy, pair = model(tied), Pair("a", [1, 2, 3], [4, 5, 6, 7], [4, 8, 9], [1] * 4, [1] * 3)
    row = build_row([pair, pair], (0, 1))
    scorer = make_scorer(policy, [pair], CPU).train()
    with FlopCounterMode(display=False) as counter:
        row_logps(scorer, row).logps.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for operator, flops in counted.items() if "attention" not in str(operator))
    flops = model_flops(policy)
    assert products == flops.per_token * len(row.input_ids) + flops.per_target * len(row.target_ids)
    assert flops.per_token == 6 * 2 * LAYER


def test_frozen_weights_take_four_and_adapters_six():
    policy = add_adapter(model(), 2, 4.0, "all-linear", False, False, seed=0)
    adapter = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    flops = model_flops(policy.get_base_model())
    assert flops.per_token == 4 * 2 * LAYER + 6 * adapter
    assert flops.per_target == 4 * 64 * 16


def test_attention_takes_twelve_per_channel_and_attended_token():
    """4 heads of 4 channels in 2 layers: QK and PV take 4 each in the forward pass, twice that in the backward pass."""
    assert model_flops(model()).of(batch(attended_tokens=10)) == 12 * 4 * 4 * 2 * 10


def test_only_the_experts_that_a_token_visits_count():
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 1, "head_dim": 4}
    sparse = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, **HEADS, **experts))
    routers = 2 * 4 * 16
    assert model_flops(sparse).per_token == 6 * (2 * LAYER + routers)


def test_sharded_and_4_bit_weights_count_in_full():
    policy = model()
    expected = model_flops(policy)
    query, key = policy.model.layers[0].self_attn.q_proj.weight, policy.model.layers[0].self_attn.k_proj.weight
    query.ds_numel, query.ds_shape = query.numel(), query.shape
    query.data = torch.empty(0)
    key.quant_state = SimpleNamespace(shape=key.shape)
    key.data = torch.empty(key.numel() // 2)  # two values in each byte
    assert model_flops(policy) == expected
