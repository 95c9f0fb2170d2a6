"""Signs of a degenerate policy whose rewards still rise: repetition, little variety, changed lengths."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

DIGITS = 4
REPETITION_N = 4  # repetition counts 4-grams of words


def variety(texts: Sequence[str]) -> dict[str, float]:
    """Distinct-1 and distinct-2 over all answers, mean repetition within an answer, share of empty answers."""
    words = [text.split() for text in texts]
    return {
        "distinct_1": distinct(words, 1),
        "distinct_2": distinct(words, 2),
        "repetition": round(mean(repetition(answer) for answer in words), DIGITS),
        "empty": round(mean(not answer for answer in words), DIGITS),
    }


def distinct(answers: Sequence[Sequence[str]], n: int) -> float:
    """The share of different n-grams among all n-grams."""
    grams = [gram for words in answers for gram in _ngrams(words, n)]
    return round(len(set(grams)) / len(grams), DIGITS) if grams else 0.0


def repetition(words: Sequence[str]) -> float:
    """The share of an answer's 4-grams that repeat an earlier one."""
    grams = _ngrams(words, REPETITION_N)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def drift(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """How the policy's answers moved away from the base model's, from their summaries; the gate limits these values."""
    values = {
        "repetition": after["repetition"],
        "repetition_rise": after["repetition"] - before["repetition"],
        "empty": after["empty"],
        "unfinished": 1 - after["finished"],
        "length_ratio": after["tokens"] / before["tokens"] if before["tokens"] else 0.0,
        "distinct_2_ratio": after["distinct_2"] / before["distinct_2"] if before["distinct_2"] else 0.0,
    }
    return {name: round(value, DIGITS) for name, value in values.items()}


def _ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
