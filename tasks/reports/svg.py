"""Small charts as SVG text, drawn with the page's own colours: nothing is loaded, nothing runs."""

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 26, 26
Point = tuple[float, float]


def lines(title: str, series: Mapping[str, Sequence[Point]], diagonal: bool = False) -> str:
    """One line per name over a common axis; a single point is a dot."""
    drawn = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return ""
    every = [point for points in drawn.values() for point in points] + ([(0.5, 0.5), (1, 1)] if diagonal else [])
    scale = _Scale([x for x, _ in every], [y for _, y in every])
    parts = [_line(scale, [(0.5, 0.5), (1, 1)], "grey")] if diagonal else []
    for number, points in enumerate(drawn.values()):
        parts.append(_line(scale, points, f"c{number % 4}"))
        if len(points) < 12:
            parts += [f'<circle class="c{number % 4}" cx="{x}" cy="{y}" r="3"/>' for x, y in map(scale, points)]
    return _figure(title, list(drawn), scale, parts)


def bars(title: str, points: Sequence[Point]) -> str:
    """A histogram: (middle, height) of bars of equal width."""
    if not points:
        return ""
    xs = [x for x, _ in points]
    half = (xs[1] - xs[0]) / 2 if len(xs) > 1 else 0.5
    scale = _Scale([min(xs) - half, max(xs) + half], [0.0, *(y for _, y in points)])
    parts = []
    for x, y in points:
        (left, top), (right, floor) = scale((x - half, y)), scale((x + half, 0.0))
        parts.append(f'<rect class="c0" x="{left}" y="{top}" width="{right - left:.1f}" height="{floor - top:.1f}"/>')
    return _figure(title, [], scale, parts)


class _Scale:
    """From values to places in the picture."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x, self.y = _span(xs), _span(ys)

    def __call__(self, point: Point) -> Point:
        x = LEFT + (point[0] - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Round values inside the span, about five: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _line(scale: _Scale, points: Sequence[Point], kind: str) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in map(scale, points))}"/>'


def _figure(title: str, names: list[str], scale: _Scale, parts: list[str]) -> str:
    floor = HEIGHT - BOTTOM
    axes = [f'<path class="axis" d="M{LEFT},{TOP}V{floor}H{WIDTH - RIGHT}"/>']
    for value in _ticks(*scale.y):
        y = scale((scale.x[0], value))[1]
        axes += [f'<path class="axis" d="M{LEFT},{y}H{WIDTH - RIGHT}"/>', _text(LEFT - 4, y + 4, _short(value), "end")]
    for value in _ticks(*scale.x):
        x = scale((value, scale.y[0]))[0]
        axes += [f'<path class="axis" d="M{x},{floor}v4"/>', _text(x, floor + 16, _short(value), "middle")]
    legend = "".join(f'<span class="k{n % 4}">{html.escape(name)}</span>' for n, name in enumerate(names))
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
    return (
        f"<figure>{drawing}{_text(LEFT, 14, title, 'start', 'title')}{''.join(axes + parts)}</svg>"
        f"<figcaption>{legend}</figcaption></figure>"
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() and 1000 <= abs(value) < 1e5 else f"{value:.3g}"
