"""Signs of a model that broke while its rewards rose: repetition, the same words everywhere, other lengths."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

DIGITS = 4
REPEATED = 4  # words in a row


def variety(texts: Sequence[str]) -> dict[str, float]:
    """Of a model's answers: distinct-1 and distinct-2 over all of them, repetition within one, and empty ones."""
    words = [text.split() for text in texts]
    return {
        "distinct_1": distinct(words, 1),
        "distinct_2": distinct(words, 2),
        "repetition": round(mean(repetition(answer) for answer in words), DIGITS),
        "empty": round(mean(not answer for answer in words), DIGITS),
    }


def distinct(answers: Sequence[Sequence[str]], n: int) -> float:
    """Different n-grams as a share of all."""
    grams = [gram for words in answers for gram in _grams(words, n)]
    return round(len(set(grams)) / len(grams), DIGITS) if grams else 0.0


def repetition(words: Sequence[str]) -> float:
    """The share of an answer's 4-grams that it said before."""
    grams = _grams(words, REPEATED)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def drift(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """From two summaries: how the policy's answers moved away from the base's, as the gate limits it."""
    found = {
        "repetition": after["repetition"],
        "repetition_rise": after["repetition"] - before["repetition"],
        "empty": after["empty"],
        "unfinished": 1 - after["finished"],
        "length_ratio": after["tokens"] / before["tokens"] if before["tokens"] else 0.0,
        "distinct_2_ratio": after["distinct_2"] / before["distinct_2"] if before["distinct_2"] else 0.0,
    }
    return {name: round(value, DIGITS) for name, value in found.items()}


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
