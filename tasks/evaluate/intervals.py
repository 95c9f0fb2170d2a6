"""95% confidence intervals: how far a value would move with other held-out prompts.

Prompts are the independent draws, not pairs or answers: those of the same prompt are not independent. Nothing is
resampled: percentiles of a bootstrap are too narrow for few prompts, near a limit and in a long tail. The methods were
chosen by the errors that each end makes in a simulation (docs/decisions).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose, sqrt

import numpy
from numpy.typing import NDArray
from scipy.special import betaincinv, stdtrit

TAIL = 0.025  # the chance that each end may err
Z = 1.959964  # the quantile of the normal distribution for it
SKEW = 1.5  # times a sample's skewness: a long tail shows too little of itself in most samples
UNSEEN = 0.5  # a prompt at the limit that none of the sample reached, counted as this many
DIGITS = 6
MOST_GROUPS = 1000  # of prompts that `interval` leaves out one after the other

Limits = tuple[float, float]  # the smallest and the largest possible value
Floats = NDArray[numpy.float64]
Statistic = Callable[[NDArray[numpy.int64]], float]


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float

    def bounds(self) -> dict[str, float]:
        return {"low": self.low, "high": self.high}


def mean_interval(values: Sequence[float], prompts: Sequence[str], limits: Limits | None = None) -> Interval:
    """The mean of values, one or several per prompt, with its interval over prompts."""
    assert len(values) == len(prompts) > 0
    _, group = numpy.unique(numpy.asarray(prompts), return_inverse=True)
    sums = numpy.bincount(group, weights=numpy.asarray(values, dtype=float))
    counts = numpy.bincount(group)
    mean = float(sums.sum() / counts.sum())
    return _interval(mean, (sums - mean * counts) / counts.sum(), limits, len(counts))


def interval(statistic: Statistic, count: int, limits: Limits | None = None, rests_on: int | None = None) -> Interval:
    """A statistic of `count` prompts, a smooth function of their indices, with its interval by the jackknife.

    `rests_on` is how many prompts of equal weight say as much, if their weights differ.
    """
    index = numpy.arange(count)
    value, groups = statistic(index), numpy.array_split(index, min(count, MOST_GROUPS))
    if count == 1:
        return _interval(value, numpy.zeros(1), limits, 1)
    others = [value - statistic(numpy.delete(index, group)) for group in groups]
    shares = [1 - len(group) / count for group in groups]
    return _interval(value, numpy.nan_to_num(numpy.multiply(others, shares)), limits, rests_on or len(groups))


def _interval(value: float, moves: Floats, limits: Limits | None, count: int) -> Interval:
    """The interval of a value, to which each prompt (or group of them) contributed a move, together about zero."""
    size = float(numpy.sqrt((moves**2).sum()))
    if size <= 1e-9 * max(1.0, abs(value)):
        low, high = _unseen(value, count, limits) if limits else (value, value)
    elif limits:
        reach = limits[1] - limits[0]
        low = limits[0] + reach * _lower_share((value - limits[0]) / reach, size / reach, count)
        high = limits[1] - reach * _lower_share((limits[1] - value) / reach, size / reach, count)
    else:
        low, high = _by_skewness(value, size, float((moves**3).sum()), count)
    return Interval(round(value, DIGITS), round(low, DIGITS), round(high, DIGITS))


def _by_skewness(value: float, size: float, cubes: float, count: int) -> tuple[float, float]:
    """Student's interval, and Hall's, which a skewed distribution moves; of each end the outer one.

    Hall, "On the removal of skewness by transformation" (1992): (1 + a T / 3)^3 is close to 1 + a (t - a / 6).
    """
    skew, error, t = SKEW * cubes / size**3, size * sqrt(count / (count - 1)), float(stdtrit(count - 1, 1 - TAIL))

    def hall(quantile: float) -> float:
        return 3 / skew * (float(numpy.cbrt(1 + skew * (quantile - skew / 6))) - 1) if abs(skew) > 1e-6 else quantile

    return value - error * max(t, hall(t)), value + error * max(t, -hall(-t))


def _lower_share(share: float, size: float, count: int) -> float:
    """The lower end of a mean between 0 and 1: Clopper and Pearson's, which is exact for yes and no.

    It is taken for so many yes-or-no prompts as would be as sure as these are, by the variance between prompts (Korn
    and Graubard, 1998). A part of a prompt at 0 counts as well, since a rare loss may be missing from the sample.
    """
    total = count + UNSEEN
    mean = share * count / total
    if mean <= 0:
        return 0.0
    spread = (count * size) ** 2 + count * (share - mean) ** 2 + UNSEEN * mean**2
    variance = spread / total / (total - 1)
    as_sure = mean * (1 - mean) / variance * (Z / float(stdtrit(count - 1, 1 - TAIL))) ** 2
    return float(betaincinv(mean * as_sure, (1 - mean) * as_sure + 1, TAIL))


def _unseen(value: float, count: int, limits: Limits) -> tuple[float, float]:
    """The interval where all prompts agree, however few there are.

    Wilson's score interval gives the share of prompts that may differ although none of `count` does. Those may differ
    as far as the limits allow. For a share of 1 this is Wilson's interval itself.
    """
    share = Z**2 / (count + Z**2)
    return value + share * (limits[0] - value), value + share * (limits[1] - value)


def prompts_needed(mean: float, low: float, minimum: float, count: float) -> float:
    """About how many prompts bring the lower end of `count` prompts' interval up to `minimum`, if the mean stays.

    The width of an interval falls with the root of the count, and of one where all prompts agree with the count.
    """
    ratio = (mean - low) / (mean - minimum)
    share = Z**2 / (count + Z**2)
    if any(isclose(mean - low, share * reach, abs_tol=2 * 10**-DIGITS) for reach in (0.5, 1.0)):  # _unseen
        return (count + Z**2) * ratio - Z**2
    return count * ratio**2
