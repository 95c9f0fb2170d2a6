"""The results of a sweep: the metrics of its runs, the best run by one of them, a table, and a figure.

Metrics are read from the runs' journals under the names that MLflow shows.
"""

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import filterfalse
from operator import itemgetter
from pathlib import Path
from typing import Any

from tasks.artifacts import evaluation
from tasks.errors import UserError
from tasks.tracking import plots

Row = dict[str, Any]  # name, values, state, metric, low, high, seconds, why


def check_metric(metric: str, metrics: Mapping[str, float], run: str) -> None:
    if metric not in metrics:
        names = [name for name in sorted(metrics) if "/intervals/" not in name]
        raise UserError(f"The run {run} has no metric '{metric}'. There are: {', '.join(names) or 'none at all'}.")


def interval(metrics: Mapping[str, float], metric: str) -> evaluation.Interval | None:
    """The interval of a metric of evaluate.json, if it has one."""
    if not metric.startswith(("eval/", "samples/")):
        return None
    measured = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
    return evaluation.interval(measured, metric.removeprefix("eval/"))


def ranked(rows: Sequence[Row], goal: str) -> list[Row]:
    """The best first; runs without a value last, in their order."""
    measured = sorted(filter(_is_measured, rows), key=itemgetter("metric"), reverse=goal == "max")
    return [*measured, *filterfalse(_is_measured, rows)]


def _is_measured(row: Row) -> bool:
    return row["metric"] is not None and not math.isnan(row["metric"])


def not_told_apart(rows: Sequence[Row]) -> list[str]:
    """Runs whose interval overlaps the best one's: their order may be chance."""
    best, *others = rows
    if best["low"] is None:
        return []
    known = [row for row in others if row["low"] is not None]
    return [row["name"] for row in known if row["low"] <= best["high"] and row["high"] >= best["low"]]


def show(rows: Sequence[Row], metric: str, lines: Sequence[str]) -> None:
    """On the terminal, with the next steps below."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="The sweep, best run first", title_justify="left", title_style="bold")
    for name in ("run", *varied(rows), metric, "95% interval", "seconds"):
        table.add_column(name, justify="left" if name == "run" else "right", overflow="fold")
    for number, row in enumerate(rows):
        style = "bold" if number == 0 and row["metric"] is not None else "red" if row["state"] == "failed" else ""
        table.add_row(*map(Text, cells(row, varied(rows))), style=style)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print()
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def cells(row: Row, names: Sequence[str]) -> list[str]:
    value = row["state"] if row["metric"] is None else f"{row['metric']:.4g}"
    bounds = "" if row["low"] is None else f"{row['low']:.4g} to {row['high']:.4g}"
    return [row["name"], *(str(row["values"].get(key, "")) for key in names), value, bounds, f"{row['seconds']:.0f}"]


def varied(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row["values"]))


def write(rows: Sequence[Row], metric: str, folder: Path) -> list[Path]:
    """Write sweep.csv and the figure."""
    names = varied(rows)
    table = folder / "sweep.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", *names, metric, "low", "high", "seconds", "state"])
        for row in rows:
            values = [row["values"].get(name, "") for name in names]
            figures = [row[name] for name in ("metric", "low", "high", "seconds", "state")]
            writer.writerow([row["name"], *values, *figures])
    finished = [row for row in rows if row["metric"] is not None]
    figure = folder / "sweep.png"
    axes = [(name, [row["values"].get(name) for row in finished]) for name in names]
    plots.parallel([*axes, (metric, [row["metric"] for row in finished])], figure)
    return [table, figure]
