"""Bootstrap confidence intervals: how far a mean would move with other held-out prompts.

Prompts are resampled, not pairs or answers: those of the same prompt are not independent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose

import numpy

RESAMPLES = 1000
CONFIDENCE = 0.95
Z = 1.959964  # the quantile of the normal distribution for this confidence
DIGITS = 6
LARGEST_BLOCK = 2**16  # indices that are drawn at once


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float

    def bounds(self) -> dict[str, float]:
        return {"low": self.low, "high": self.high}


def mean_interval(
    values: Sequence[float], prompts: Sequence[str], seed: int, limits: tuple[float, float] | None = None
) -> Interval:
    """The mean of values, one or several per prompt, with its 95% interval over prompts.

    `limits` are the smallest and the largest possible value, if the values are bounded.
    """
    assert len(values) == len(prompts) > 0
    _, group = numpy.unique(numpy.asarray(prompts), return_inverse=True)
    sums = numpy.bincount(group, weights=numpy.asarray(values, dtype=float))
    counts = numpy.bincount(group)
    generator, count = numpy.random.default_rng(seed), len(sums)
    at_once = max(1, LARGEST_BLOCK // count)
    resampled: list[float] = []
    while (rest := RESAMPLES - len(resampled)) > 0:
        index = generator.integers(0, count, (min(at_once, rest), count))
        resampled += (sums[index].sum(axis=1) / counts[index].sum(axis=1)).tolist()
    return widened(_percentiles(float(sums.sum() / counts.sum()), resampled), count, limits)


def widened(result: Interval, count: int, limits: tuple[float, float] | None) -> Interval:
    """The interval, or Wilson's where all resamples agree."""
    return _wilson(result.mean, count, limits) if limits and result.low == result.high else result


def interval(statistic: Callable[[numpy.ndarray], float], count: int, seed: int) -> Interval:
    """A statistic of `count` items, a function of their indices, with the percentiles of its resamples."""
    generator = numpy.random.default_rng(seed)
    resampled = [statistic(generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    return _percentiles(statistic(numpy.arange(count)), resampled)


def _percentiles(value: float, resampled: list[float]) -> Interval:
    low, high = numpy.nanquantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(round(value, DIGITS), round(float(low), DIGITS), round(float(high), DIGITS))


def _wilson(mean: float, count: int, limits: tuple[float, float]) -> Interval:
    """The interval where all prompts agree: a bootstrap then sees no spread, however few prompts there are.

    Wilson's score interval gives the share of prompts that may differ although none of `count` does. Those may differ
    as far as the limits allow. For a share of 1 this is Wilson's interval itself.
    """
    share = Z**2 / (count + Z**2)
    low, high = (mean + share * (limit - mean) for limit in limits)
    return Interval(mean, round(low, DIGITS), round(high, DIGITS))


def prompts_needed(mean: float, low: float, minimum: float, count: float) -> float:
    """About how many prompts bring the lower end of `count` prompts' interval up to `minimum`, if the mean stays.

    The width of an interval falls with the root of the count, and of one where all prompts agree with the count.
    """
    ratio = (mean - low) / (mean - minimum)
    share = Z**2 / (count + Z**2)
    if any(isclose(mean - low, share * reach, abs_tol=2 * 10**-DIGITS) for reach in (0.5, 1.0)):  # _wilson
        return (count + Z**2) * ratio - Z**2
    return count * ratio**2
