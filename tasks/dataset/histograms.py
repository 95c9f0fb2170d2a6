"""The data card's plots by matplotlib, as SVG text that is the same for the same data."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 40
COLOURS = {"prompt": "#777777", "chosen": "#2a7f4f", "rejected": "#b5443c"}


def histogram(values: NDArray[Any], low: float, high: float) -> dict[str, Any]:
    """Counts in equal bins from low to high; what lies outside is counted in the last one on its side."""
    counts, edges = np.histogram(np.clip(values, low, high), bins=BINS, range=(low, max(high, low + 1)))
    return {"counts": counts.tolist(), "edges": [round(float(edge), 3) for edge in edges]}


def lengths_figure(report: Mapping[str, Any]) -> str:
    """How long the parts are, and how much longer chosen is than rejected."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.2))
    for part, colour in COLOURS.items():
        shape = report["tokens"][part]["histogram"]
        left.stairs(shape["counts"], shape["edges"], label=part, color=colour)
    left.set(title="tokens", xlabel="tokens", ylabel="pairs")
    left.legend()
    shape = report["shortcuts"]["length_difference"]
    right.stairs(shape["counts"], shape["edges"], fill=True, color="#4a6fa5")
    right.axvline(0, color="black", linewidth=0.8)
    right.set(title="chosen minus rejected", xlabel="tokens")
    return _svg(figure)


def sources_figure(report: Mapping[str, Any]) -> str:
    """Where the rows of each source went."""
    pyplot = _pyplot()
    sources = report["by_source"]
    figure, axis = pyplot.subplots(figsize=(10, 0.9 + 0.5 * len(sources)))
    names = ["train", "eval", *sorted({name for one in sources.values() for name in one["left_out"]})]
    place = np.zeros(len(sources))
    for name in names:
        values = np.array([one.get(name, one["left_out"].get(name, 0)) for one in sources.values()], dtype=float)
        axis.barh(list(sources), values, left=place, label=name)
        place += values
    axis.set(title="pairs by source")
    axis.legend(fontsize=8, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.15))
    return _svg(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "data card", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}
    )
    import matplotlib.pyplot as pyplot

    return pyplot


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", bbox_inches="tight", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    _pyplot().close(figure)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
