"""Outcomes of comparisons as a win rate: ties count half, refusals are counted and left out, length is held equal."""

from collections.abc import Sequence
from typing import Any

import numpy

from tasks.evaluation.bootstrap import DIGITS, Interval, interval, mean_interval

RIDGE = 1e-3  # keeps the fit finite where length tells winners and losers apart
ITERATIONS = 15
SHARE = (0.0, 1.0)


def win_rate(
    outcomes: Sequence[float | None], prompts: Sequence[str], lengths: Sequence[float], seed: int
) -> dict[str, Any]:
    """`lengths` is how much longer the second answer is than the first."""
    judged = [number for number, outcome in enumerate(outcomes) if outcome is not None]
    counts = {"wins": outcomes.count(1.0), "ties": outcomes.count(0.5), "losses": outcomes.count(0.0)}
    counts["refused"] = len(outcomes) - len(judged)
    if not judged:
        return counts
    values = numpy.array([float(outcomes[number] or 0.0) for number in judged])
    rate = mean_interval(list(values), [prompts[number] for number in judged], seed, SHARE)
    fair = length_controlled(values, numpy.array([lengths[number] for number in judged]), seed)
    return {"rate": rate.mean, **rate.bounds(), **counts, "length_controlled": {"rate": fair.mean, **fair.bounds()}}


def length_controlled(outcomes: numpy.ndarray, lengths: numpy.ndarray, seed: int) -> Interval:
    """The win rate that a logistic fit expects between answers of equal length (after AlpacaEval 2)."""
    scale = lengths.std()
    if scale == 0 or (outcomes == outcomes[0]).all():
        return mean_interval(list(outcomes), [str(number) for number in range(len(outcomes))], seed, SHARE)
    longer = numpy.tanh(lengths / scale)
    return interval(lambda index: _at_equal_length(outcomes[index], longer[index]), len(outcomes), seed)


def _at_equal_length(outcomes: numpy.ndarray, longer: numpy.ndarray) -> float:
    """Newton's method on the log-likelihood of `sigmoid(a + b longer)`; the answer is sigmoid(a)."""
    features = numpy.stack([numpy.ones_like(longer), longer], axis=1)  # (answers, 2)
    weights = numpy.zeros(2)
    penalty = RIDGE * len(outcomes) * numpy.eye(2)
    for _ in range(ITERATIONS):
        expected = 1 / (1 + numpy.exp(-features @ weights))
        slope = features.T @ (outcomes - expected) - penalty @ weights
        curve = (features * (expected * (1 - expected))[:, None]).T @ features + penalty
        step = numpy.linalg.solve(curve, slope)
        weights += step
        if numpy.abs(step).max() < 1e-9:
            break
    return round(float(1 / (1 + numpy.exp(-weights[0]))), DIGITS)
