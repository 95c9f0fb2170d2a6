"""Figures of a run, by matplotlib: PNG files for MLflow, SVG for the run report."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Point = tuple[float, float]
Steps = Mapping[int, Mapping[str, float]]  # the metrics of each logged step
PANELS = (
    ("loss", ("loss", "eval/loss")),
    ("reward accuracy", ("rewards/accuracies", "eval/rewards/accuracies")),
    ("rewards", ("rewards/chosen", "rewards/rejected")),
    ("log-probabilities", ("logps/chosen", "logps/rejected")),
)
# Drawn in these colours, then replaced by the page's own, which follow the reader's light or dark theme.
THEME = {
    "#000001": "var(--c0)",
    "#000002": "var(--c1)",
    "#000003": "var(--soft)",
    "#000004": "var(--line)",
    "#000005": "var(--ink)",
}
FIRST, SECOND, SOFT, LINE, INK = THEME
SVG_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dpo",  # the same ids in every report
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": SOFT,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": LINE,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "legend.frameon": False,
}


def curves(steps: Steps, path: Path) -> None:
    """Training curves in four panels."""
    figure = _figure(10, 6.5)
    for axis, (title, names) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        _draw_lines(axis, by_metric(steps, names), ("C0", "C1"))
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def by_metric(steps: Steps, names: Sequence[str]) -> dict[str, list[Point]]:
    """The points (step, value) of each metric."""
    return {name: [(step, row[name]) for step, row in steps.items() if name in row] for name in names}


def held_out(bins: list[dict[str, float]], margins: list[dict[str, float]], path: Path) -> None:
    """Calibration of the implied preference, and the distribution of reward margins over held-out pairs."""
    figure = _figure(10, 4)
    calibration, histogram = figure.subplots(1, 2)
    _draw_lines(calibration, {"policy": [(b["confidence"], b["accuracy"]) for b in bins]}, ("C0",), diagonal="grey")
    calibration.set(title="calibration of the implied preference", xlabel="confidence", ylabel="accuracy")
    _draw_histogram(histogram, [(m["margin"], m["pairs"]) for m in margins], "C0")
    histogram.axvline(0, color="grey", linestyle=":")
    histogram.set(title="reward margins", xlabel="margin", ylabel="pairs")
    figure.savefig(path, dpi=110)


def win_rates(nights: Sequence[tuple[int, Mapping[str, float]]], path: Path) -> None:
    """Win rate with its interval, night by night."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpo", "font.size": 12}):
        figure = _figure(9, 3.6)
        axis = figure.subplots()
        numbers, rates = [night for night, _ in nights], [rate["rate"] for _, rate in nights]
        spread = [
            [rate["rate"] - rate["low"] for _, rate in nights],
            [rate["high"] - rate["rate"] for _, rate in nights],
        ]
        axis.axhline(0.5, color="#94a3b8", linestyle=":")
        axis.errorbar(numbers, rates, yerr=spread, color="#2563b8", marker="o", linewidth=2.5, markersize=8, capsize=5)
        for number, rate in zip(numbers, rates, strict=True):
            axis.annotate(f"{rate:.0%}", (number, rate), xytext=(10, 8), textcoords="offset points", fontweight="bold")
        labels = ["base model", *(f"after night {number}" for number in numbers[1:])]
        axis.set_xticks(numbers, labels)
        axis.set(ylabel="win rate vs. base", ylim=(0.4, 0.85), xlim=(-0.25, max(numbers) + 0.4))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def parallel(axes: Sequence[tuple[str, Sequence[Any]]], path: Path) -> None:
    """Parallel coordinates: an axis for each column, a line for each row, coloured by the last column."""
    from matplotlib import colormaps

    figure = _figure(max(6.0, 2.2 * len(axes)), 4.5)
    axis = figure.subplots()
    scales = [_scale(values) for _, values in axes]
    for heights in zip(*(heights for heights, _ in scales), strict=True):
        colour = colormaps["viridis"](heights[-1])
        axis.plot(range(len(axes)), heights, color=colour, marker="o", linewidth=2, alpha=0.8)
    for x, (_, labels) in enumerate(scales):
        axis.axvline(x, color="black", linewidth=0.8)
        for height, text in labels:
            axis.annotate(text, (x, height), xytext=(4, 3), textcoords="offset points", fontsize=8)
    axis.set_xticks(range(len(axes)), [name for name, _ in axes])
    axis.set(yticks=[], ylim=(-0.06, 1.1), xlim=(-0.15, len(axes) - 0.6))
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _scale(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights between 0 and 1 and the axis labels: numbers by size, anything else in its order."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    names: list[Any] = sorted(set(values)) if numbers else list(dict.fromkeys(map(str, values)))
    if numbers:
        low, high = float(names[0]), float(names[-1])
        logarithmic = low > 0 and high / low >= 20  # learning rates, say
        positions = {value: math.log(value) if logarithmic else float(value) for value in names}
    else:
        positions = {name: float(index) for index, name in enumerate(names)}
    least, most = min(positions.values()), max(positions.values())
    heights = {name: (at - least) / (most - least) if most > least else 0.5 for name, at in positions.items()}
    shown = names if len(names) <= 8 else [names[0], names[-1]]
    labels = [(heights[name], f"{name:.4g}" if numbers else name[:24]) for name in shown]
    return [heights[value if numbers else str(value)] for value in values], labels


def line_svg(title: str, series: Mapping[str, Sequence[Point]], diagonal: bool = False) -> str:
    """One line per name; empty where there is nothing to draw."""
    from matplotlib import rc_context

    with rc_context(SVG_STYLE):
        axis = _figure(4.6, 2.7).subplots()
        _draw_lines(axis, series, (FIRST, SECOND), SOFT if diagonal else None)
        return _svg(title, axis) if axis.lines else ""


def bar_svg(title: str, points: Sequence[Point]) -> str:
    """A histogram from (middle, height) of bars of equal width; empty where there is nothing to draw."""
    from matplotlib import rc_context

    with rc_context(SVG_STYLE):
        axis = _figure(4.6, 2.7).subplots()
        _draw_histogram(axis, points, FIRST)
        return _svg(title, axis) if points else ""


def _draw_lines(
    axis: Any, series: Mapping[str, Sequence[Point]], colours: Sequence[str], diagonal: str | None = None
) -> None:
    """A line per name with finite points, with dots where there are few; `diagonal` is the colour of the ideal."""
    finite = {name: [point for point in points if all(map(math.isfinite, point))] for name, points in series.items()}
    lines = {name: points for name, points in finite.items() if points}
    if lines and diagonal:
        axis.plot([0.5, 1], [0.5, 1], linestyle=":", color=diagonal, label="calibrated")
    for (name, points), colour in zip(lines.items(), colours, strict=False):
        axis.plot(*zip(*points, strict=True), color=colour, label=name, marker="." if len(points) < 12 else None)
    if len(axis.lines) > 1:
        axis.legend()


def _draw_histogram(axis: Any, points: Sequence[Point], colour: str) -> None:
    width = points[1][0] - points[0][0] if len(points) > 1 else 1.0
    axis.bar([x for x, _ in points], [height for _, height in points], width=width, color=colour)


def _svg(title: str, axis: Any) -> str:
    """The figure as an element of a page, in the page's colours."""
    axis.set_title(title, parse_math=False)
    axis.grid(axis="y")
    for artist in axis.figure.findobj():
        artist.set_clip_on(False)  # nothing leaves the axes, and a clip path would be a url() in the page
    text, nothing = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    axis.figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = re.sub(r'<g id="[^"]*">', "<g>", text.getvalue()[text.getvalue().index("<svg") :])  # ids repeat in a page
    for colour, variable in THEME.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def _figure(width: float, height: float) -> Any:
    """A figure of its own: pyplot would keep a list of figures and choose a backend for the whole process."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
