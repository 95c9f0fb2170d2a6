"""Figures of a run, by matplotlib."""

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


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot
