"""Figures of a run, by matplotlib."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("loss", ("loss", "eval/loss")),
    ("reward accuracy", ("rewards/accuracies", "eval/rewards/accuracies")),
    ("rewards", ("rewards/chosen", "rewards/rejected")),
    ("log-probabilities", ("logps/chosen", "logps/rejected")),
)


def curves(steps: dict[int, dict[str, float]], path: Path) -> None:
    """The course of training in four panels."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    for axis, (title, names) in zip(axes.flat, PANELS, strict=True):
        for name in names:
            points = [(step, row[name]) for step, row in steps.items() if name in row]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) == 1 else None)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def held_out(bins: list[dict[str, float]], margins: list[dict[str, float]], path: Path) -> None:
    """How right the policy is when it is so sure, and how the margins of held-out pairs are spread."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot([0.5, 1], [0.5, 1], linestyle=":", color="grey", label="calibrated")
    left.plot([b["confidence"] for b in bins], [b["accuracy"] for b in bins], marker="o", label="policy")
    left.set(title="calibration of the implied preference", xlabel="how sure", ylabel="how often right")
    left.legend()
    width = margins[1]["margin"] - margins[0]["margin"] if len(margins) > 1 else 1.0
    right.bar([m["margin"] for m in margins], [m["pairs"] for m in margins], width=width)
    right.axvline(0, color="grey", linestyle=":")
    right.set(title="reward margins", xlabel="margin", ylabel="pairs")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parallel(axes: Sequence[tuple[str, Sequence[Any]]], path: Path) -> None:
    """Parallel coordinates: an axis for each column, a line for each row, coloured by the last column."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(max(6.0, 2.2 * len(axes)), 4.5), layout="constrained")
    scales = [_scale(values) for _, values in axes]
    colours = pyplot.get_cmap("viridis")
    for row in range(len(axes[-1][1])):
        heights = [heights[row] for heights, _ in scales]
        axis.plot(range(len(axes)), heights, color=colours(heights[-1]), marker="o", linewidth=2, alpha=0.8)
    for place, (_, marks) in enumerate(scales):
        axis.axvline(place, color="black", linewidth=0.8)
        for height, text in marks:
            axis.annotate(text, (place, height), xytext=(4, 3), textcoords="offset points", fontsize=8)
    axis.set_xticks(range(len(axes)), [name for name, _ in axes])
    axis.set(yticks=[], ylim=(-0.06, 1.1), xlim=(-0.15, len(axes) - 0.6))
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _scale(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights between 0 and 1, and what is written where: numbers by size, anything else in its order."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    names: list[Any] = sorted(set(values)) if numbers else list(dict.fromkeys(map(str, values)))
    if numbers:
        low, high = float(names[0]), float(names[-1])
        logarithmic = low > 0 and high / low >= 20  # learning rates, say
        place = {value: math.log(value) if logarithmic else float(value) for value in names}
    else:
        place = {name: float(at) for at, name in enumerate(names)}
    least, most = min(place.values()), max(place.values())
    heights = {name: (at - least) / (most - least) if most > least else 0.5 for name, at in place.items()}
    shown = names if len(names) <= 8 else [names[0], names[-1]]
    marks = [(heights[name], f"{name:.4g}" if numbers else name[:24]) for name in shown]
    return [heights[value if numbers else str(value)] for value in values], marks


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot
