"""Metrics of the policy on held-out pairs: intervals, calibration, length bias, and the strongest disagreements."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import correlation
from typing import Any, TypeVar

import numpy
from numpy.typing import NDArray

from tasks.evaluate.intervals import DIGITS, Interval, interval, mean_interval
from training.evaluation.samples import PairValues

K = TypeVar("K", int, str)
PairRow = dict[str, Any]  # a row of data/pairs
BUCKETS = (32, 64, 128, 256, 512)  # the upper ends of the buckets, in tokens of the longer response
BINS = 10
LIMITS = {"rewards/accuracies": (0.0, 1.0), "rewards/auc": (0.0, 1.0)}
WITH_TEXTS = 50  # the first pairs of pairs.jsonl have texts whatever their margin


def held_out(values: Sequence[PairValues], rows: Sequence[PairRow]) -> dict[str, Any]:
    """The parts of evaluate.json that need the values of each pair, not only their means."""
    prompts = [row["prompt"] for row in rows]
    columns = {
        "rewards/accuracies": [float(value.margin > 0) for value in values],
        "rewards/margins": [value.margin for value in values],
        "kl": [value.kl for value in values],
    }
    between = unpaired_intervals(values, prompts) if any(value.sign for value in values) else {}
    intervals = {
        name: mean_interval(column, prompts, LIMITS.get(name))
        for name, column in columns.items()
        if name not in between
    }
    return {
        **{name: interval.mean for name, interval in between.items() if name == "rewards/auc"},
        "intervals": {name: interval.bounds() for name, interval in (intervals | between).items()},
        "calibration": _errors(values),
        "length_bias": length_bias(values),
        "tables": {
            "source": _table(values, [row.get("source") or "all" for row in rows]),
            "length": _table(values, [bucket(max(v.chosen_tokens, v.rejected_tokens)) for v in values]),
        },
    }


def probability(value: PairValues) -> float:
    """The probability that the chosen response is better, from the implied rewards (Bradley-Terry)."""
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, value.margin))))


def bucket(tokens: int) -> str:
    for start, end in pairwise((0, *BUCKETS)):
        if tokens <= end:
            return f"{start + 1}-{end}"
    return f"{BUCKETS[-1] + 1}-"


def length_bias(values: Sequence[PairValues]) -> dict[str, float]:
    """Accuracy where the chosen response is shorter, longer or as long, and the correlation of margin and length.

    Of unpaired rows the correlation of reward and length: a row has no other response.
    """
    if any(value.sign for value in values):
        lengths = [float(value.chosen_tokens) for value in values]
        return {"correlation": _correlation(lengths, [_own_reward(value) for value in values])}
    lengths = [float(value.chosen_tokens - value.rejected_tokens) for value in values]
    names = ["chosen_shorter" if length < 0 else "chosen_longer" if length else "same_length" for length in lengths]
    groups = sorted(_grouped(values, names).items())
    bias = {f"{name}/pairs": float(len(group)) for name, group in groups}
    bias |= {f"{name}/accuracy": _accuracy(group) for name, group in groups}
    return {**bias, "correlation": _correlation(lengths, [value.margin for value in values])}


def unpaired_intervals(values: Sequence[PairValues], prompts: Sequence[str]) -> dict[str, Interval]:
    """Of unpaired rows, with intervals over prompts: accuracy, in which both labels count the same; the reward margin
    between the labels; and the AUC, the share of desirable and undesirable answers that the rewards order rightly.
    Without rows of both labels, nothing.
    """
    sign, right = numpy.array([value.sign for value in values]), numpy.array([value.margin > 0 for value in values])
    reward, (_, group) = numpy.array([*map(_own_reward, values)]), numpy.unique(prompts, return_inverse=True)
    _, rank = numpy.unique(reward, return_inverse=True)
    if abs(sign.sum()) == len(sign):
        return {}

    def statistic(name: str, index: NDArray[Any]) -> float:
        count = numpy.bincount(index, minlength=group.max() + 1)[group]  # of each row in the resample
        up, down = count * (sign > 0), count * (sign < 0)
        if not up.any() or not down.any():
            return numpy.nan
        if name == "rewards/auc":
            higher, lower = (numpy.bincount(rank, side) for side in (up, down))
            return float(higher @ (lower.cumsum() - lower / 2) / (up.sum() * down.sum()))  # a tie counts half
        first, second = (
            (side * (right if name == "rewards/accuracies" else reward)).sum() / side.sum() for side in (up, down)
        )
        return float((first + second) / 2 if name == "rewards/accuracies" else first - second)

    names = ("rewards/accuracies", "rewards/margins", "rewards/auc")
    rarer = min(len(numpy.unique(group[sign > 0])), len(numpy.unique(group[sign < 0])))
    count = int(group.max()) + 1
    return {name: interval(partial(statistic, name), count, LIMITS.get(name), 2 * rarer) for name in names}


def _own_reward(value: PairValues) -> float:
    return value.rejected_reward if value.sign < 0 else value.chosen_reward


def calibration(values: Sequence[PairValues]) -> list[dict[str, float]]:
    """By bin of confidence in the preferred response: mean confidence, accuracy and number of pairs."""
    bins = _grouped(values, [min(BINS - 1, int((_confidence(value) - 0.5) * 2 * BINS)) for value in values])
    return [
        {
            "confidence": round(sum(map(_confidence, group)) / len(group), DIGITS),
            "accuracy": round(_share_right(group), DIGITS),
            "pairs": len(group),
        }
        for _, group in sorted(bins.items())
    ]


def histogram(values: Sequence[PairValues], bins: int = 20) -> list[dict[str, float]]:
    """The number of pairs by margin. Each bin has the margin of its middle."""
    margins = numpy.round([value.margin for value in values], 6)  # numpy refuses a range of a few rounding errors
    counts, edges = numpy.histogram(margins, bins)
    middles = (edges[:-1] + edges[1:]) / 2
    return [
        {"margin": round(margin, 4), "pairs": count}
        for margin, count in zip(middles.tolist(), counts.tolist(), strict=True)
    ]


def disagreements(
    values: Sequence[PairValues], rows: Sequence[PairRow], decode: Callable[[list[list[int]]], list[str]]
) -> list[dict[str, Any]]:
    """Every pair, the strongest disagreement with its label first: wrong labels show up there."""
    ordered = sorted(zip(values, rows, strict=True), key=lambda item: (item[0].margin, item[0].id))
    decoded = [item for number, item in enumerate(ordered) if number < WITH_TEXTS or item[0].margin <= 0]
    texts = iter(decode([row[f"{name}_ids"] for value, row in decoded for name in _own_answers(value)]))
    by_id = {value.id: {side: next(texts) for side in _own_answers(value).values()} for value, _ in decoded}
    return [_line(value, row, by_id.get(value.id, {})) for value, row in ordered]


def _own_answers(value: PairValues) -> dict[str, str]:
    """The name of each answer by its column. An unpaired row has its own answer, of either kind, in `chosen`."""
    if value.sign:
        return {"chosen": "chosen" if value.sign > 0 else "rejected"}
    return {"chosen": "chosen", "rejected": "rejected"}


def _line(value: PairValues, row: PairRow, texts: dict[str, str]) -> dict[str, Any]:
    return {
        "id": value.id,
        "prompt": row["prompt"],
        "source": row.get("source") or "all",
        "margin": round(value.margin, DIGITS),
        "probability": round(probability(value), DIGITS),
        "chosen_reward": round(value.chosen_reward, DIGITS),
        "rejected_reward": round(value.rejected_reward, DIGITS),
        "chosen_tokens": value.chosen_tokens,
        "rejected_tokens": value.rejected_tokens,
        **({"sign": value.sign} if value.sign else {}),
        **texts,
    }


def _errors(values: Sequence[PairValues]) -> dict[str, float]:
    """Expected calibration error, Brier score and log loss of the implied preference."""
    bins = calibration(values)
    gap = sum(abs(entry["confidence"] - entry["accuracy"]) * entry["pairs"] for entry in bins) / len(values)
    chances = [probability(value) for value in values]
    return {
        "expected_error": round(gap, DIGITS),
        "brier": round(sum((1 - chance) ** 2 for chance in chances) / len(values), DIGITS),
        "log_loss": round(-sum(math.log(max(chance, 1e-300)) for chance in chances) / len(values), DIGITS),
    }


def _grouped(values: Sequence[PairValues], keys: Sequence[K]) -> dict[K, list[PairValues]]:
    groups = defaultdict[K, list[PairValues]](list)
    for value, key in zip(values, keys, strict=True):
        groups[key].append(value)
    return groups


def _table(values: Sequence[PairValues], names: Sequence[str]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "pairs": len(group),
            "accuracy": _accuracy(group),
            "margin": round(sum(value.margin for value in group) / len(group), DIGITS),
            "kl": round(sum(value.kl for value in group) / len(group), DIGITS),
        }
        for name, group in sorted(_grouped(values, names).items(), key=lambda item: (_first_number(item[0]), item[0]))
    }


def _first_number(name: str) -> int:
    head = name.partition("-")[0]
    return int(head) if head.isdecimal() else 0


def _accuracy(values: Sequence[PairValues]) -> float:
    """Both labels of unpaired rows count the same, whatever their number."""
    kinds = [[value for value in values if value.sign == sign] for sign in {value.sign for value in values}]
    return round(sum(map(_share_right, kinds)) / len(kinds), DIGITS)


def _share_right(values: Sequence[PairValues]) -> float:
    return sum(value.margin > 0 for value in values) / len(values)  # a tie is not a win


def _confidence(value: PairValues) -> float:
    chance = probability(value)
    return max(chance, 1 - chance)


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation; 0 if one column is constant."""
    is_constant = len(set(first)) == 1 or len(set(second)) == 1
    return 0.0 if is_constant else round(correlation(first, second), DIGITS)
