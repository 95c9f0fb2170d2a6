"""Markdown tables of figures."""

from collections.abc import Sequence


def versus(ours: float | None, other: float | None) -> str:
    """Both figures and their ratio in one cell."""
    return f"{_cell(ours)} / {_cell(other)} = {_cell(ours / other) if ours and other else '-'}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [list(heads), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
