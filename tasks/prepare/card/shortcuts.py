"""Shortcuts: what a model could learn instead of the preference, such as length, end tokens or single words.

The probe is a logistic regression on hashed bags of tokens. It sees which tokens are in only one of the two answers,
but neither their order nor the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUCKETS = 1 << 15
STEPS, RATE, MOMENTUM, DECAY = 100, 1.0, 0.9, 1e-3
# Limits for warnings.
PROBE_ACCURACY = 0.85
LENGTH_BIAS = 0.2  # distance from one half of the share of pairs in which chosen is longer
END_DIFFERENCE = 0.1  # between the shares of chosen and rejected answers with an end token

PairRow = Mapping[str, Any]  # a row of data/pairs
Bags = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]  # pair, bucket, value


def probe_accuracy(train: Sequence[PairRow], held_out: Sequence[PairRow]) -> float:
    """How often the probe, fitted on `train`, prefers the chosen answer of a held-out pair; a tie counts half."""
    if not train or not held_out:  # unpaired rows of one kind
        return 0.5
    weights = _fit(_bags(train), len(train))
    scores = _scores(weights, _bags(held_out), len(held_out))
    return float(np.mean(np.where(scores == 0.0, 0.5, scores > 0.0)))


def _fit(bags: Bags, size: int) -> NDArray[np.float64]:
    """A fixed number of full-batch gradient steps with momentum: the same pairs give the same weights."""
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


def _bags(pairs: Sequence[PairRow]) -> Bags:
    """For each pair +1 for a token that only chosen has and -1 for one that only rejected has, scaled to length 1."""
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
    """A sentence for each shortcut that the data offers."""
    sentences = []
    if facts["probe_accuracy"] >= PROBE_ACCURACY:
        sentences.append(
            f"a bag of words finds the chosen answer in {facts['probe_accuracy']:.1%} of held-out pairs: the "
            "preference can be learned from single words. Expected if it is about tone or style; otherwise check how "
            "the answers were made"
        )
    longer = facts["chosen_longer"]
    if abs(longer - 0.5) >= LENGTH_BIAS:
        sentences.append(f"chosen is the longer answer in {longer:.1%} of the pairs: the model may learn length")
    chosen, rejected = facts["chosen_ends"], facts["rejected_ends"]
    if abs(chosen - rejected) >= END_DIFFERENCE:
        sentences.append(
            f"{chosen:.1%} of the chosen and {rejected:.1%} of the rejected answers have an end token: the model may "
            "learn the end token"
        )
    return sentences
