"""Intervals by bootstrap: how far a mean would move if other prompts had been held out.

Prompts are resampled and not pairs or answers: those of one prompt are not independent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

RESAMPLES = 1000
CONFIDENCE = 0.95
Z = 1.959964  # of the normal distribution at that confidence
DIGITS = 6


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float

    def bounds(self) -> dict[str, float]:
        return {"low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def mean_interval(
    values: Sequence[float], prompts: Sequence[str], seed: int, limits: tuple[float, float] | None = None
) -> Interval:
    """The mean of values, each of which belongs to a prompt, with its 95% interval over prompts.

    `limits` are the least and the most that a value can be, where there are such.
    """
    assert len(values) == len(prompts) > 0
    _, group = numpy.unique(numpy.asarray(prompts), return_inverse=True)
    sums = numpy.bincount(group, weights=numpy.asarray(values, dtype=float))
    counts = numpy.bincount(group)
    found = interval(lambda index: float(sums[index].sum() / counts[index].sum()), len(sums), seed)
    return _unseen(found.mean, len(sums), limits) if limits and found.low == found.high else found


def interval(statistic: Callable[[numpy.ndarray], float], count: int, seed: int) -> Interval:
    """A statistic of `count` items, given their indices, with the percentiles of its resamples."""
    generator = numpy.random.default_rng(seed)
    drawn = [statistic(generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = numpy.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    whole = statistic(numpy.arange(count))
    return Interval(round(whole, DIGITS), round(float(low), DIGITS), round(float(high), DIGITS))


def _unseen(mean: float, count: int, limits: tuple[float, float]) -> Interval:
    """Where all prompts agree a bootstrap sees no spread, however few they are.

    Wilson's score interval says how large a share of prompts may differ without one being among `count`; they may
    differ as far as the limits go. For a share of 1 this is Wilson's interval itself.
    """
    share = Z**2 / (count + Z**2)
    low, high = (mean + share * (limit - mean) for limit in limits)
    return Interval(mean, round(low, DIGITS), round(high, DIGITS))
