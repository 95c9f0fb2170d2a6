"""The win rate of a list of outcomes: ties count half, refusals are excluded, and a second rate controls for length."""

from collections.abc import Sequence
from typing import Any

import numpy

from tasks.evaluate.intervals import Interval, interval, mean_interval

RIDGE = 1e-3  # keeps the fit finite where length alone separates wins from losses
ITERATIONS = 15
SHARE = (0.0, 1.0)


def win_rate(outcomes: Sequence[float | None], prompts: Sequence[str], lengths: Sequence[float]) -> dict[str, Any]:
    """`lengths` holds the length of the second answer minus that of the first."""
    judged = [number for number, outcome in enumerate(outcomes) if outcome is not None]
    counts = {"wins": outcomes.count(1.0), "ties": outcomes.count(0.5), "losses": outcomes.count(0.0)}
    counts["refused"] = len(outcomes) - len(judged)
    if not judged:
        return counts
    values = numpy.array([float(outcomes[number] or 0.0) for number in judged])
    rate = mean_interval(list(values), [prompts[number] for number in judged], SHARE)
    controlled = length_controlled(values, numpy.array([lengths[number] for number in judged]))
    by_length = {"rate": controlled.mean, **controlled.bounds()}
    return {"rate": rate.mean, **rate.bounds(), **counts, "length_controlled": by_length}


def length_controlled(outcomes: numpy.ndarray, lengths: numpy.ndarray) -> Interval:
    """The win rate that a logistic fit predicts for answers of equal length (as in AlpacaEval 2)."""
    scale = lengths.std()
    if scale == 0 or (outcomes == outcomes[0]).all():
        return mean_interval(list(outcomes), [str(number) for number in range(len(outcomes))], SHARE)
    scaled = numpy.tanh(lengths / scale)
    return interval(lambda index: _at_equal_length(outcomes[index], scaled[index]), len(outcomes), SHARE)


def _at_equal_length(outcomes: numpy.ndarray, lengths: numpy.ndarray) -> float:
    """sigmoid(a) of the fit `sigmoid(a + b length)`, by Newton's method on the log-likelihood."""
    features = numpy.stack([numpy.ones_like(lengths), lengths], axis=1)  # (answers, 2)
    weights = numpy.zeros(2)
    penalty = RIDGE * len(outcomes) * numpy.eye(2)
    for _ in range(ITERATIONS):
        expected = 1 / (1 + numpy.exp(-features @ weights))
        gradient = features.T @ (outcomes - expected) - penalty @ weights
        hessian = (features * (expected * (1 - expected))[:, None]).T @ features + penalty
        step = numpy.linalg.solve(hessian, gradient)
        weights += step
        if numpy.abs(step).max() < 1e-9:
            break
    return float(1 / (1 + numpy.exp(-weights[0])))
