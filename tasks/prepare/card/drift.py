"""Data drift: how far the statistics of new data moved from those of the champion's data, against `promote.drift`.

The data contract checks single rows; drift compares all rows together, by two data cards. A retraining compares them
before the reference stage, so that a run on wrong data stops within minutes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Card = Mapping[str, Any]  # data/card/report.json


@dataclass(frozen=True)
class Shift:
    """How far one statistic moved, and how far it may."""

    name: str
    moved: float
    allowed: float
    detail: str

    @property
    def too_far(self) -> bool:
        return not self.moved <= self.allowed

    def __str__(self) -> str:
        return f"{self.name} {self.detail} (moved by {self.moved:.3g}, limit {self.allowed:g})"


def shifts(limits: Mapping[str, float], old: Card, new: Card) -> list[Shift]:
    """The shift of every statistic that has a limit."""
    measured = {name: DRIFT_METRICS[name](old, new) for name in limits}
    return [Shift(name, round(moved, 6), limits[name], detail) for name, (moved, detail) in measured.items()]


def _fewer_pairs(old: Card, new: Card) -> tuple[float, str]:
    """Retraining expects more data; less data is a broken export."""
    before, now = (sum(card["pairs"].values()) for card in (old, new))
    return max(0.0, 1 - now / before), f"{before} -> {now}"


def _tokens(old: Card, new: Card) -> tuple[float, str]:
    """The largest relative change of a mean length, of prompt, chosen or rejected."""
    means = {part: (old["tokens"][part]["mean"], new["tokens"][part]["mean"]) for part in old["tokens"]}
    moved = {part: abs(now - before) / max(before, 1e-9) for part, (before, now) in means.items()}
    part = max(moved, key=lambda name: moved[name])
    return moved[part], f"of the {part}, mean {means[part][0]:g} -> {means[part][1]:g}"


def _sources(old: Card, new: Card) -> tuple[float, str]:
    """Total variation distance between the sources' shares: half the sum of their differences."""
    before, now = _shares(old), _shares(new)
    moves = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in {*before, *now}}
    most = max(sorted(moves), key=lambda name: abs(moves[name]))
    distance = sum(map(abs, moves.values())) / 2
    return distance, f"{most} {before.get(most, 0.0):.1%} -> {now.get(most, 0.0):.1%}"


def _shares(card: Card) -> dict[str, float]:
    counts = {name: source["train"] + source["eval"] for name, source in card["by_source"].items()}
    return {name: count / max(1, sum(counts.values())) for name, count in counts.items()}


def _rejected(old: Card, new: Card) -> tuple[float, str]:
    before, now = map(_share_rejected, (old, new))
    return max(0.0, now - before), f"{before:.1%} -> {now:.1%} of the pairs"


def _share_rejected(card: Card) -> float:
    """Pairs outside a sample are not rejected: more of them are no fault of the data."""
    rejected = sum(count for name, count in card["left_out"].items() if name != "not_sampled")
    return rejected / max(1, rejected + sum(card["pairs"].values()))


def _shortcut(name: str, old: Card, new: Card) -> tuple[float, str]:
    before, now = old["shortcuts"][name], new["shortcuts"][name]
    return abs(now - before), f"{before:.1%} -> {now:.1%}"


DRIFT_METRICS: dict[str, Callable[[Card, Card], tuple[float, str]]] = {
    "fewer_pairs": _fewer_pairs,
    "tokens": _tokens,
    "sources": _sources,
    "left_out": _rejected,
    "chosen_longer": partial(_shortcut, "chosen_longer"),
    "probe": partial(_shortcut, "probe_accuracy"),  # shows labels that were mixed up or flipped
}
