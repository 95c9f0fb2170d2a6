"""Whether new data are still the kind of data that the champion learnt from: two data cards, and limits in params.

A contract says what a row must be; drift is what all rows together have become. It is asked before the reference is
computed, so that a night on the wrong data costs minutes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Card = Mapping[str, Any]  # data/card/report.json


@dataclass(frozen=True)
class Shift:
    """How far one figure moved, and how far it may."""

    name: str
    moved: float
    allowed: float
    said: str

    @property
    def too_far(self) -> bool:
        return not self.moved <= self.allowed

    def __str__(self) -> str:
        return f"{self.name} {self.said} ({self.moved:.3g}, and {self.allowed:g} is allowed)"


def shifts(limits: Mapping[str, float], old: Card, new: Card) -> list[Shift]:
    """Every figure that has a limit."""
    return [Shift(name, *_rounded(FIGURES[name](old, new), allowed)) for name, allowed in limits.items()]


def _rounded(found: tuple[float, str], allowed: float) -> tuple[float, float, str]:
    return round(found[0], 6), allowed, found[1]


def _fewer_pairs(old: Card, new: Card) -> tuple[float, str]:
    """Growth is what retraining is for; a loss is a broken export."""
    before, now = (sum(card["pairs"].values()) for card in (old, new))
    return max(0.0, 1 - now / before), f"{before} -> {now}"


def _tokens(old: Card, new: Card) -> tuple[float, str]:
    """The part whose mean length moved most, against what it was."""
    means = {part: (old["tokens"][part]["mean"], new["tokens"][part]["mean"]) for part in old["tokens"]}
    moved = {part: abs(now - before) / max(before, 1e-9) for part, (before, now) in means.items()}
    part = max(moved, key=lambda name: moved[name])
    return moved[part], f"of the {part}, mean {means[part][0]:g} -> {means[part][1]:g}"


def _sources(old: Card, new: Card) -> tuple[float, str]:
    """How much of the pairs would have to come from elsewhere: half the sum of differences of shares."""
    before, now = _shares(old), _shares(new)
    moves = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in {*before, *now}}
    most = max(sorted(moves), key=lambda name: abs(moves[name]))
    distance = sum(map(abs, moves.values())) / 2
    return distance, f"{most} {before.get(most, 0.0):.1%} -> {now.get(most, 0.0):.1%}"


def _shares(card: Card) -> dict[str, float]:
    counts = {name: one["train"] + one["eval"] for name, one in card["by_source"].items()}
    return {name: count / max(1, sum(counts.values())) for name, count in counts.items()}


def _left_out(old: Card, new: Card) -> tuple[float, str]:
    before, now = (sum(card["left_out"].values()) / max(1, card["rows"]) for card in (old, new))
    return max(0.0, now - before), f"{before:.1%} -> {now:.1%} of the rows"


def _chosen_longer(old: Card, new: Card) -> tuple[float, str]:
    return _fact("chosen_longer", old, new)


def _probe(old: Card, new: Card) -> tuple[float, str]:
    """How well words alone tell chosen from rejected: labels that were mixed up or flipped show here."""
    return _fact("probe_accuracy", old, new)


def _fact(name: str, old: Card, new: Card) -> tuple[float, str]:
    before, now = old["shortcuts"][name], new["shortcuts"][name]
    return abs(now - before), f"{before:.1%} -> {now:.1%}"


FIGURES: dict[str, Callable[[Card, Card], tuple[float, str]]] = {
    "fewer_pairs": _fewer_pairs,
    "tokens": _tokens,
    "sources": _sources,
    "left_out": _left_out,
    "chosen_longer": _chosen_longer,
    "probe": _probe,
}
