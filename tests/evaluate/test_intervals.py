"""Confidence intervals: how often each end errs, and what they rest on."""

import math
from collections.abc import Callable

import numpy
import pytest

from tasks.evaluate.held_out import unpaired_intervals
from tasks.evaluate.intervals import Interval, interval, mean_interval
from tasks.evaluate.win_rate import length_controlled
from training.evaluation.samples import PairValues

SHARE, EITHER = (0.0, 1.0), (-1.0, 1.0)
NAMES = [str(n) for n in range(400)]
Draw = Callable[[numpy.random.Generator, int], numpy.ndarray]


def chosen(*values: float, chances: tuple[float, ...]) -> Draw:
    return lambda random, count: random.choice(values, count, p=chances)


DRAWS: dict[str, tuple[Draw, float, tuple[float, float] | None]] = {
    "normal": (lambda random, count: random.normal(size=count), 0.0, None),
    "a tail to the left": (lambda random, count: -random.exponential(size=count), -1.0, None),
    "lognormal": (lambda random, count: random.lognormal(size=count), math.exp(0.5), None),
    "right or wrong, 80%": (chosen(0, 1, chances=(0.2, 0.8)), 0.8, SHARE),
    "right or wrong, 95%": (chosen(0, 1, chances=(0.05, 0.95)), 0.95, SHARE),
    "wins and ties": (chosen(0, 0.5, 1, chances=(0.1, 0.2, 0.7)), 0.8, SHARE),
    "mostly ties": (chosen(0, 0.5, 1, chances=(0.08, 0.9, 0.02)), 0.47, SHARE),
    "rare differences": (chosen(-1, 0, 1, chances=(0.05, 0.93, 0.02)), -0.03, EITHER),
}
LONG_TAILS = {("a tail to the left", 16): 0.04, ("lognormal", 16): 0.065, ("lognormal", 64): 0.04}  # docs/decisions


def errors(make: Callable[[], Interval], truth: float, times: int) -> tuple[float, float]:
    """How often the lower end is above the truth, and the upper end below it."""
    found = [make() for _ in range(times)]
    above, below = (one.low > truth + 1e-6 for one in found), (one.high < truth - 1e-6 for one in found)
    return sum(above) / times, sum(below) / times


@pytest.mark.parametrize("count", [16, 64, 400])
@pytest.mark.parametrize("name", DRAWS)
def test_each_end_errs_in_one_of_forty_samples(name, count):
    """2.5% are meant, and 3% allowed; 2,000 samples tell that from 4%. The percentiles of a bootstrap err, with 16
    values, in 4% of normal, 16% of lognormal and 14% of right-or-wrong samples (80%); with 64 in 3%, 8% and 12% (95%).
    """
    draw, truth, limits = DRAWS[name]
    random = numpy.random.default_rng(count)
    found = errors(lambda: mean_interval(draw(random, count), NAMES[:count], limits), truth, 2000)
    assert max(found) < LONG_TAILS.get((name, count), 0.03) + 0.01, found


def test_prompts_with_several_pairs_err_no_more_often():
    """Prompts differ in difficulty and have one to five pairs."""
    random = numpy.random.default_rng(0)

    def sample() -> Interval:
        pairs = random.integers(1, 6, 64)
        prompts = numpy.repeat(NAMES[:64], pairs)
        right = random.random(pairs.sum()) < numpy.repeat(random.choice([0.6, 0.9], 64), pairs)
        return mean_interval(list(right), list(prompts), SHARE)

    assert max(errors(sample, 0.75, 2000)) < 0.035


def test_a_win_rate_at_equal_length_errs_no_more_often():
    random = numpy.random.default_rng(0)

    def sample() -> Interval:
        lengths = random.normal(0.5, 1.0, 64)
        chance = 1 / (1 + numpy.exp(-1 - numpy.tanh(lengths / lengths.std())))
        return length_controlled((random.random(64) < chance).astype(float), lengths)

    assert max(errors(sample, 1 / (1 + math.exp(-1)), 150)) < 0.05


def test_unpaired_rows_of_which_few_are_undesirable_err_no_more_often():
    """Rewards of +0.75 and -0.75 with a standard deviation of 1: accuracy Phi(0.75), AUC Phi(1.5 / sqrt 2)."""
    truth = {"rewards/accuracies": 0.7734, "rewards/margins": 1.5, "rewards/auc": 0.8556}
    random, signs = numpy.random.default_rng(0), [1] * 32 + [-1] * 8
    rest = {"chosen_tokens": 3, "rejected_tokens": 3, "kl": 0.0}
    missed = dict.fromkeys(truth, 0)
    for _ in range(200):
        rewards = random.normal(0.75 * numpy.array(signs), 1.0)
        sides = [(reward, 0.0) if sign > 0 else (0.0, reward) for reward, sign in zip(rewards, signs, strict=True)]
        values = [
            PairValues(id="", chosen_reward=high, rejected_reward=low, sign=sign, **rest)
            for (high, low), sign in zip(sides, signs, strict=True)
        ]
        for name, found in unpaired_intervals(values, NAMES[:40]).items():
            missed[name] += not found.low <= truth[name] <= found.high
    assert max(missed.values()) <= 0.08 * 200, missed


def test_the_interval_of_a_mean_agrees_with_its_standard_error():
    values = list(numpy.random.default_rng(1).normal(2.0, 1.0, 400))
    found = mean_interval(values, [str(n) for n in range(400)])
    error = numpy.std(values) / math.sqrt(400)  # about 0.05
    assert found.mean == pytest.approx(numpy.mean(values), abs=1e-6)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert mean_interval(values, [str(n) for n in range(400)]) == found


def test_pairs_of_one_prompt_are_one_draw():
    """Ten copies of each of 20 values say no more than the 20 do: the interval must not shrink by sqrt(10)."""
    values = [float(n % 2) for n in range(20)]
    alone = mean_interval(values, [str(n) for n in range(20)])
    copies = mean_interval(values * 10, [str(n) for n in range(20)] * 10)
    assert (copies.low, copies.high) == (alone.low, alone.high)


def test_the_interval_depends_on_the_number_of_prompts_even_if_all_agree():
    """Wilson's lower bound at a share of 1 is n / (n + z^2): 200 / 203.84 = 0.98116."""
    found = mean_interval([1.0] * 200, [str(n) for n in range(200)], (0.0, 1.0))
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.98116, abs=1e-5)
    assert mean_interval([0.0] * 4, list("abcd"), (0.0, 1.0)).high == pytest.approx(3.8415 / 7.8415, abs=1e-4)
    same = mean_interval([0.0] * 200, [str(n) for n in range(200)], (-1.0, 1.0))  # two models that never differed
    assert (same.low, same.high) == (pytest.approx(-0.01884, abs=1e-5), pytest.approx(0.01884, abs=1e-5))


def test_any_statistic_has_an_interval():
    found = interval(lambda index: float(numpy.exp(index / 101).mean()), 101)  # the same as the mean of exp
    mean = mean_interval(list(numpy.exp(numpy.arange(101) / 101)), NAMES[:101])
    assert (found.low, found.high) == pytest.approx((mean.low, mean.high), abs=1e-6)
