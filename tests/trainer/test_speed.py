"""Throughput and MFU against hand-computed values, with a fake clock."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from training.trainer import speed
from training.trainer.speed import Speed

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(speed.time, "monotonic", lambda: time.now)
    return time


def model() -> nn.Module:
    """Frozen weights of 3 x 5 = 15 and trained weights of 5 x 2 = 10, no bias."""
    frozen, trained = nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False)
    frozen.requires_grad_(False)
    return nn.Sequential(frozen, trained)


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


def test_mfu_counts_six_flops_for_a_trained_weight_and_four_for_a_frozen_one(clock):
    """15 frozen and 10 trained weights: 4 x 15 + 6 x 10 = 120 FLOPs per token. 1000 tokens in 2 s on 2 devices with
    a peak of 60,000 a second each: 120 x 500 / 2 / 60,000 = 0.5."""
    rates = Speed(model(), CPU, world=2, before={})
    rates.peak = 60_000.0
    clock.now += 2.0
    assert rates.since({"tokens": 1000.0, "pairs": 8.0})["mfu"] == pytest.approx(0.5)


def test_sharded_and_4_bit_weights_count_in_full():
    policy = model()
    policy[0].weight.data = torch.empty(0)
    policy[0].weight.ds_numel = 15
    policy[1].weight.data = torch.empty(5)  # two values in each byte
    policy[1].weight.quant_state = SimpleNamespace(shape=torch.Size([5, 2]))
    assert Speed(policy, CPU, world=1, before={}).flops_per_token == 4 * 15 + 6 * 10
