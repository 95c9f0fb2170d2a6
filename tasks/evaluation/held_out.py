"""What the policy's values of held-out pairs say: intervals, calibration, length bias, and where it disagrees."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from tasks.evaluation.bootstrap import DIGITS, mean_interval
from training.outputs import PairValues

Row = dict[str, Any]  # of the pairs artefact
BUCKETS = (32, 64, 128, 256, 512)  # tokens of the longer response; a bucket ends with its number
BINS = 10
LIMITS = {"rewards/accuracies": (0.0, 1.0)}
SHOWN = 50  # pairs whose texts are always written out


def held_out(values: Sequence[PairValues], rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """The parts of evaluate.json that need each pair and not their mean alone."""
    prompts = [row["prompt"] for row in rows]
    columns = {
        "rewards/accuracies": [float(value.margin > 0) for value in values],
        "rewards/margins": [value.margin for value in values],
        "kl": [value.kl for value in values],
    }
    return {
        "intervals": {
            name: mean_interval(column, prompts, seed, LIMITS.get(name)).bounds() for name, column in columns.items()
        },
        "calibration": _errors(values),
        "length_bias": length_bias(values),
        "tables": {
            "source": _table(values, [row.get("source") or "all" for row in rows]),
            "length": _table(values, [bucket(max(v.chosen_tokens, v.rejected_tokens)) for v in values]),
        },
    }


def probability(value: PairValues) -> float:
    """That the chosen response is the better one, as the implied rewards have it (Bradley-Terry)."""
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, value.margin))))


def bucket(tokens: int) -> str:
    before = 0
    for end in BUCKETS:
        if tokens <= end:
            return f"{before + 1}-{end}"
        before = end
    return f"{before + 1}-"


def length_bias(values: Sequence[PairValues]) -> dict[str, float]:
    """Accuracy where the chosen response is the shorter, the longer, and whether a margin follows length."""
    groups: dict[str, list[PairValues]] = defaultdict(list)
    for value in values:
        difference = value.chosen_tokens - value.rejected_tokens
        groups["chosen_shorter" if difference < 0 else "chosen_longer" if difference else "same_length"].append(value)
    found = {f"{name}/pairs": float(len(group)) for name, group in sorted(groups.items())}
    found |= {f"{name}/accuracy": _accuracy(group) for name, group in sorted(groups.items())}
    lengths = [float(value.chosen_tokens - value.rejected_tokens) for value in values]
    return {**found, "correlation": _correlation(lengths, [value.margin for value in values])}


def calibration(values: Sequence[PairValues]) -> list[dict[str, float]]:
    """By how sure the policy is of its preferred response: how sure on average, and how often it is right."""
    bins: dict[int, list[PairValues]] = defaultdict(list)
    for value in values:
        bins[min(BINS - 1, int((_confidence(value) - 0.5) * 2 * BINS))].append(value)
    return [
        {
            "confidence": round(sum(map(_confidence, group)) / len(group), DIGITS),
            "accuracy": _accuracy(group),
            "pairs": len(group),
        }
        for _, group in sorted(bins.items())
    ]


def histogram(values: Sequence[PairValues], bins: int = 20) -> list[dict[str, float]]:
    """How many pairs have which margin; a bin is named by its middle."""
    margins = [value.margin for value in values]
    low, high = min(margins), max(margins)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for margin in margins:
        counts[min(bins - 1, int((margin - low) / width))] += 1
    return [{"margin": round(low + (n + 0.5) * width, 4), "pairs": count} for n, count in enumerate(counts)]


def disagreements(
    values: Sequence[PairValues], rows: Sequence[Row], decode: Callable[[list[list[int]]], list[str]]
) -> list[dict[str, Any]]:
    """Every pair, the one that the policy most prefers the wrong way first: bad labels are found there."""
    ordered = sorted(zip(values, rows, strict=True), key=lambda item: (item[0].margin, item[0].id))
    shown = [item for number, item in enumerate(ordered) if number < SHOWN or item[0].margin <= 0]
    texts = iter(decode([row[f"{name}_ids"] for _, row in shown for name in ("chosen", "rejected")]))
    written = {value.id: {"chosen": next(texts), "rejected": next(texts)} for value, _ in shown}
    return [_line(value, row, written.get(value.id, {})) for value, row in ordered]


def _line(value: PairValues, row: Row, texts: dict[str, str]) -> dict[str, Any]:
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


def _table(values: Sequence[PairValues], names: Sequence[str]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[PairValues]] = defaultdict(list)
    for value, name in zip(values, names, strict=True):
        groups[name].append(value)
    return {
        name: {
            "pairs": len(group),
            "accuracy": _accuracy(group),
            "margin": round(sum(value.margin for value in group) / len(group), DIGITS),
            "kl": round(sum(value.kl for value in group) / len(group), DIGITS),
        }
        for name, group in sorted(groups.items(), key=lambda item: (_first_number(item[0]), item[0]))
    }


def _first_number(name: str) -> int:
    head = name.partition("-")[0]
    return int(head) if head.isdecimal() else 0


def _accuracy(values: Sequence[PairValues]) -> float:
    return round(sum(value.margin > 0 for value in values) / len(values), DIGITS)  # a tie is not a win


def _confidence(value: PairValues) -> float:
    chance = probability(value)
    return max(chance, 1 - chance)


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's; 0 where one of them does not vary."""
    a, b = ([value - sum(column) / len(column) for value in column] for column in (first, second))
    spread = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return round(sum(x * y for x, y in zip(a, b, strict=True)) / spread, DIGITS) if spread else 0.0
