"""beta-DPO: beta and the kept pairs of a global batch, against numbers derived in view."""

from dataclasses import replace

import pytest
import torch

from tests.objectives.test_losses import L, many, pairs
from training.objectives.global_batch import MIN_BETA_FACTOR, GlobalBatch, calibrate
from training.objectives.objective import Objective

OPTIONS = {"beta": 0.1, "beta_alpha": 2.0}


def batch(gaps: list[float], weight: list[float] | None = None) -> GlobalBatch:
    """Pairs whose chosen ratio is the gap h and whose rejected ratio is 0."""
    given = many(len(gaps))
    whole = replace(
        given,
        chosen_logps=given.ref_chosen_logps + torch.tensor(gaps, dtype=torch.float64),
        rejected_logps=given.ref_rejected_logps,
    )
    ones = [1.0] * len(gaps)
    return GlobalBatch(pairs=whole, weight=torch.tensor(weight or ones, dtype=torch.float64), row_positions=[])


def running(mean: float = 0.0, deviation: float = 0.0) -> torch.Tensor:
    return torch.tensor([mean, deviation], dtype=torch.float64)


def test_beta_follows_the_mean_reward_margin_against_its_running_mean():
    # Gaps 1, 2 and 6: reward margins 0.1, 0.2 and 0.6, mean 0.3, deviation sqrt((0.04 + 0.01 + 0.09) / 3).
    # M_0 = 0.9 * 0.2 + 0.1 * 0.3 = 0.21, and beta = 0.1 * (1 + 2 * (0.3 - 0.21)).
    made = calibrate(batch([1.0, 2.0, 6.0]), Objective({"sigmoid": 1.0}, OPTIONS), running(0.2, 0.5), seed=0)
    assert made.beta.item() == pytest.approx(0.1 * (1 + 2 * 0.09))
    assert made.running.tolist() == pytest.approx([0.21, 0.9 * 0.5 + 0.1 * (0.14 / 3) ** 0.5])
    assert made.filter_weight.tolist() == [1.0, 1.0, 1.0]
    slower = Objective({"sigmoid": 1.0}, {**OPTIONS, "beta_momentum": 0.5})
    assert calibrate(batch([1.0, 2.0, 6.0]), slower, running(0.2), seed=0).running[0].item() == pytest.approx(0.25)


def test_beta_stays_positive():
    # 1 + 2 * (-3 - 0.9 * 10 + 0.1 * 3) is far below 0.
    made = calibrate(batch([-30.0]), Objective({"sigmoid": 1.0}, OPTIONS), running(10.0), seed=0)
    assert made.beta.item() == pytest.approx(MIN_BETA_FACTOR * 0.1)


def test_the_filter_drops_outliers_and_the_mean_is_over_what_is_left():
    """Nine margins near the running mean and one 40 deviations away: whatever is drawn, the outlier is dropped."""
    objective = Objective({"sigmoid": 1.0}, {**OPTIONS, "beta_filter": 0.1})
    given = batch([0.1 * n for n in range(-4, 5)] + [40.0], weight=[2.0] * 5 + [1.0] * 5)
    for seed in range(20):
        made = calibrate(given, objective, running(0.0, 0.1), seed)
        # 15 of weight in all, 14 of it kept: a weighted mean over the batch is the mean over the kept pairs.
        assert made.filter_weight.tolist() == pytest.approx([15 / 14] * 9 + [0.0])
        assert made.beta.item() == pytest.approx(0.1 * (1 + 2 * (0.0 - 0.1 * 0.4)))  # M_0 = 0.1 * mean of all ten


def test_the_draw_depends_on_the_seed_alone_while_margins_are_rounding():
    """At the first step the policy is the reference: rounding, which depends on the rows, must not choose the pairs."""
    objective = Objective({"sigmoid": 1.0}, {**OPTIONS, "beta_filter": 0.5})

    def drawn(seed: int, noise: float) -> list[bool]:
        made = calibrate(batch([noise * (-1) ** n for n in range(8)]), objective, running(), seed)
        return (made.filter_weight > 0).tolist()

    assert all(drawn(seed, 1e-6) == drawn(seed, -1e-6) for seed in range(20))
    assert all(sum(drawn(seed, 1e-6)) == 4 for seed in range(20))
    assert len({tuple(drawn(seed, 1e-6)) for seed in range(20)}) > 10


def test_the_batchs_beta_takes_the_place_of_the_configured_one_where_h_is_read():
    given = pairs(batch_beta=torch.tensor(0.2), filter_weight=torch.tensor([1.5], dtype=torch.float64))
    parts = Objective({"sigmoid": 1.0, "apo_zero": 1.0}, OPTIONS).components(given)
    assert parts["sigmoid"].item() == pytest.approx(-1.5 * L(0.2 * 3.0))
    plain = Objective({"apo_zero": 1.0}, {"beta": 0.1}).components(pairs())
    assert parts["apo_zero"].item() == pytest.approx(1.5 * plain["apo_zero"].item())
    assert [x.item() for x in Objective({"sigmoid": 1.0}, OPTIONS).rewards(given)] == pytest.approx([0.2, -0.1])
