"""Each loss against a number derived in view, and the checks that need no number."""

import math
from dataclasses import replace

import pytest
import torch

from training.losses import LOSSES, Objective, Pairs, check, log1mexp

# One pair: c - c0 = 2, r - r0 = -1, so h = 3; 4 and 2 tokens.
C, R, C0, R0, NW, NL = -10.0, -8.0, -12.0, -7.0, 4.0, 2.0


def pairs(c=C, r=R, c0=C0, r0=R0, nw=NW, nl=NL, dtype=torch.float64) -> Pairs:
    return Pairs(*(torch.tensor([value], dtype=dtype) for value in (c, r, c0, r0, nw, nl)))


def value(name: str, given: Pairs | None = None, **options: float) -> float:
    return LOSSES[name](given or pairs(), **options).item()


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_sigmoid_is_minus_log_sigmoid_of_beta_h():
    assert value("sigmoid", beta=0.1) == pytest.approx(-log_sigmoid(0.1 * 3))


def test_label_smoothing_mixes_in_the_swapped_label():
    expected = -0.9 * log_sigmoid(0.3) - 0.1 * log_sigmoid(-0.3)
    assert value("sigmoid", beta=0.1, label_smoothing=0.1) == pytest.approx(expected)


def test_length_normalization_divides_each_ratio_by_its_tokens():
    assert value("sigmoid", beta=0.1, length_normalization=True) == pytest.approx(-log_sigmoid(0.1 * (2 / 4 - -1 / 2)))


def test_hinge_is_one_minus_beta_h_and_never_negative():
    assert value("hinge", beta=0.1) == pytest.approx(1 - 0.3)
    assert value("hinge", beta=1.0) == 0.0


def test_ipo_squares_the_distance_of_token_means_from_its_target():
    assert value("ipo", beta=0.1) == pytest.approx((2 / 4 - -1 / 2 - 1 / 0.2) ** 2)


def test_simpo_compares_token_means_without_a_reference():
    expected = -log_sigmoid(2.0 * (-10 / 4 - -8 / 2) - 0.5)
    assert value("simpo", beta=2.0, gamma=0.5) == pytest.approx(expected)
    assert value("simpo", pairs(c0=99.0, r0=-99.0), beta=2.0, gamma=0.5) == pytest.approx(expected)


def test_orpo_adds_the_log_odds_ratio_to_the_supervised_loss():
    def odds(mean: float) -> float:
        return math.exp(mean) / (1 - math.exp(mean))

    expected = 2.5 - 0.1 * log_sigmoid(math.log(odds(-2.5) / odds(-4.0)))
    assert value("orpo", beta=0.1) == pytest.approx(expected, rel=1e-6)


def test_sft_is_the_chosen_responses_loss_per_token():
    assert value("sft") == pytest.approx(10 / 4)


def test_a_combination_is_the_weighted_sum_of_its_components():
    parts = Objective({"sigmoid": 0.8, "sft": 0.2}, {"beta": 0.1}).losses(pairs())
    assert parts["loss"].item() == pytest.approx(0.8 * value("sigmoid", beta=0.1) + 0.2 * 2.5)
    assert parts["loss/sft"].item() == pytest.approx(2.5)
    assert "loss/sigmoid" not in Objective({"sigmoid": 1.0}, {"beta": 0.1}).losses(pairs())


@pytest.mark.parametrize(("name", "expected"), [("sigmoid", math.log(2)), ("hinge", 1.0), ("ipo", 1 / (4 * 0.1**2))])
def test_a_policy_that_is_the_reference_has_the_known_loss(name, expected):
    assert value(name, pairs(c0=C, r0=R), beta=0.1) == pytest.approx(expected)


def test_half_label_smoothing_does_not_see_a_swap():
    swapped = pairs(c=R, r=C, c0=R0, r0=C0)
    straight = value("sigmoid", beta=0.1, label_smoothing=0.5)
    assert straight == pytest.approx(value("sigmoid", swapped, beta=0.1, label_smoothing=0.5))


OPTIONS = {"beta": 0.1, "label_smoothing": 0.1, "gamma": 0.5}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    objective = Objective({name: 1.0}, OPTIONS)

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        fixed = pairs()
        given = Pairs(
            chosen, rejected, fixed.ref_chosen, fixed.ref_rejected, fixed.chosen_tokens, fixed.rejected_tokens
        )
        return objective.losses(given)["loss"].double()

    inputs = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (C, R)]
    # orpo is computed in float32, so its finite differences are coarse.
    coarse = {"eps": 1e-2, "atol": 1e-3, "rtol": 1e-2} if name == "orpo" else {}
    assert torch.autograd.gradcheck(loss, inputs, nondet_tol=1e-3, **coarse)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("c", "r"), [(-1e4, -1e-9), (-1e-9, -1e4), (-1e-9, -1e-9), (-1e4, -1e4)])
def test_extreme_log_probabilities_stay_finite(name, c, r):
    chosen = torch.tensor([c], requires_grad=True)
    rejected = torch.tensor([r], requires_grad=True)
    given = replace(pairs(dtype=torch.float32), chosen=chosen, rejected=rejected)
    loss = Objective({name: 1.0}, {"beta": 0.1}).losses(given)["loss"]
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert all(torch.isfinite(x.grad).all() for x in (chosen, rejected) if x.grad is not None)


def test_log1mexp_is_exact_near_both_ends():
    x = torch.tensor([-1e-5, -0.5, -0.7, -20.0], dtype=torch.float64)
    expected = [math.log(-math.expm1(v)) for v in x.tolist()]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=1e-12)


def test_rewards_are_beta_times_the_ratio_or_the_mean_without_a_reference():
    chosen, rejected = Objective({"sigmoid": 1.0}, {"beta": 0.1}).rewards(pairs())
    assert (chosen.item(), rejected.item()) == pytest.approx((0.2, -0.1))
    chosen, rejected = Objective({"simpo": 1.0}, {"beta": 2.0}).rewards(pairs())
    assert (chosen.item(), rejected.item()) == pytest.approx((2 * -2.5, 2 * -4.0))


@pytest.mark.parametrize(
    ("weights", "options", "sentence"),
    [
        ({"dpo": 1.0}, {"beta": 0.1}, "there is no loss 'dpo'"),
        ({}, {}, "loss is empty"),
        ({"sigmoid": 0.0}, {"beta": 0.1}, "must be above 0"),
        ({"sigmoid": 1.0}, {}, "needs `beta`"),
        ({"hinge": 1.0}, {"beta": 0.1, "label_smoothing": 0.1}, "`label_smoothing` has no effect on loss hinge"),
        ({"sigmoid": 1.0}, {"beta": 0.1, "gamma": 0.5}, "`gamma` has no effect"),
        ({"sft": 1.0}, {"beta": 0.1}, "`beta` has no effect"),
    ],
)
def test_what_would_be_ignored_is_refused(weights, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(weights, options)
