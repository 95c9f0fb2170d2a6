"""What a model could learn instead of the preference: length, endings, single words.

The probe is a logistic regression on bags of tokens, hashed: it sees which tokens stand in one answer alone, neither
their order nor the prompt. What it gets right on held-out pairs can be had without reading.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUCKETS = 1 << 15
STEPS, RATE, MOMENTUM, DECAY = 100, 1.0, 0.9, 1e-3
TRIVIAL = 0.85  # of the probe's accuracy
LOPSIDED = 0.2  # from one half, of the share in which chosen is longer
UNLIKE = 0.1  # between the shares of answers that end

Pair = Mapping[str, Any]
Bags = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]  # pair, bucket, value


def probe_accuracy(train: Sequence[Pair], held_out: Sequence[Pair]) -> float:
    """How often the probe, fitted on the first, prefers the chosen answer of the second; a draw counts half."""
    weights = _fit(_bags(train), len(train))
    scores = _scores(weights, _bags(held_out), len(held_out))
    return float(np.mean(np.where(scores == 0.0, 0.5, scores > 0.0)))


def _fit(bags: Bags, size: int) -> NDArray[np.float64]:
    """Gradient descent with momentum over all pairs, a fixed number of steps: the same pairs give the same weights."""
    weights, velocity = np.zeros(BUCKETS), np.zeros(BUCKETS)
    pair, bucket, value = bags
    for _ in range(STEPS):
        wrong = 1.0 / (1.0 + np.exp(_scores(weights, bags, size)))  # the loss is log(1 + exp(-score))
        gradient = np.bincount(bucket, -wrong[pair] * value, BUCKETS) / size + DECAY * weights
        velocity = MOMENTUM * velocity - RATE * gradient
        weights += velocity
    return weights


def _scores(weights: NDArray[np.float64], bags: Bags, size: int) -> NDArray[np.float64]:
    return np.bincount(bags[0], weights[bags[1]] * bags[2], size)[:size].astype(np.float64)


def _bags(pairs: Sequence[Pair]) -> Bags:
    """Of each pair, +1 for a token that only chosen has and -1 for one that only rejected has, scaled to length 1."""
    numbers, buckets, values = [], [], []
    for number, pair in enumerate(pairs):
        chosen, rejected = (np.unique(np.asarray(pair[side])) for side in ("chosen_ids", "rejected_ids"))
        only = np.setdiff1d(chosen, rejected, True), np.setdiff1d(rejected, chosen, True)
        both = np.concatenate(only)
        numbers.append(np.full(len(both), number))
        buckets.append(both % BUCKETS)
        values.append(np.repeat([1.0, -1.0], [len(only[0]), len(only[1])]) / max(1.0, len(both) ** 0.5))
    return np.concatenate(numbers), np.concatenate(buckets), np.concatenate(values)


def warnings(facts: Mapping[str, float]) -> list[str]:
    """Sentences for a person, where a shortcut is wide."""
    said = []
    if facts["probe_accuracy"] >= TRIVIAL:
        said.append(
            f"a bag of words finds the chosen answer in {facts['probe_accuracy']:.1%} of held-out pairs: the "
            "preference can be learnt from single words"
        )
    longer = facts["chosen_longer"]
    if abs(longer - 0.5) >= LOPSIDED:
        said.append(f"chosen is the longer answer in {longer:.1%} of the pairs: the model may learn length")
    ends, unlike = facts["chosen_ends"], facts["rejected_ends"]
    if abs(ends - unlike) >= UNLIKE:
        said.append(
            f"{ends:.1%} of the chosen and {unlike:.1%} of the rejected answers end: the model may learn endings"
        )
    return said
