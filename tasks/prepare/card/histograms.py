"""The data card's plots by matplotlib, as SVG. The same data gives the same text."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 40
COLORS = {"prompt": "#777777", "chosen": "#2a7f4f", "rejected": "#b5443c"}
STYLE = {"svg.hashsalt": "data card", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}


def histogram(values: NDArray[Any], low: float, high: float) -> dict[str, Any]:
    """Counts in equal bins from low to high; values outside go into the first or last bin."""
    counts, edges = np.histogram(np.clip(values, low, high), bins=BINS, range=(low, max(high, low + 1)))
    return {"counts": counts.tolist(), "edges": [round(float(edge), 3) for edge in edges]}


def lengths_figure(report: Mapping[str, Any]) -> str:
    """The lengths of prompts and responses, and how much longer chosen is than rejected."""

    def draw(figure: Any) -> None:
        lengths, difference = figure.subplots(1, 2)
        for part, color in COLORS.items():
            bins = report["tokens"][part]["histogram"]
            lengths.stairs(bins["counts"], bins["edges"], label=part, color=color)
        lengths.set(title="tokens", xlabel="tokens", ylabel="pairs")
        lengths.legend()
        bins = report["shortcuts"]["length_difference"]
        difference.stairs(bins["counts"], bins["edges"], fill=True, color="#4a6fa5")
        difference.axvline(0, color="black", linewidth=0.8)
        difference.set(title="chosen minus rejected", xlabel="tokens")

    return _svg(draw, height=3.2)


def sources_figure(report: Mapping[str, Any]) -> str:
    """How many pairs of each source are in a split or were rejected, by reason."""
    sources = report["by_source"]

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        start = np.zeros(len(sources))
        for name in ["train", "eval", *sorted({name for values in sources.values() for name in values["left_out"]})]:
            counts = [values.get(name, values["left_out"].get(name, 0)) for values in sources.values()]
            axis.barh(list(sources), counts, left=start, label=name)
            start += counts
        axis.set(title="pairs by source")
        axis.legend(fontsize=8, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.15))

    return _svg(draw, height=0.9 + 0.5 * len(sources))


def _svg(draw: Callable[[Any], None], height: float) -> str:
    import matplotlib  # heavy, and no worker process draws
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(10, height))
        draw(figure)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata=no_metadata)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
