"""The gate: the reasons why an export may not become champion. A metric that was not measured does not pass.

Of a metric with an interval the lower end counts, since the rest of the value may be luck (docs/promotion.md).
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from tasks.config.promote import Promote
from tasks.evaluate.intervals import prompts_needed
from tasks.tracking.journal import flatten_metrics

PROMPT_METRICS = ("samples/", "win_rate", "kl/answers", "health/")  # the others are measured on pairs


def gate(params: Promote, metrics: Mapping[str, Any], checks: Mapping[str, Any]) -> list[str]:
    """Reasons from the absolute limits; empty when the model passes. Without a champion these limits alone decide."""
    values = flatten_metrics(metrics)
    intervals = metrics.get("intervals", {})
    reasons = [f"the export is not verified: the check {name} failed" for name, ok in checks.items() if ok is False]
    for name, minimum in params.require.items():
        if name not in values:
            reasons.append(f"{name} was not measured{_similar(name, values)}")
        elif not intervals.get(name, {"low": values[name]})["low"] >= minimum:
            count = None if name.startswith(PROMPT_METRICS) else values.get("pairs")
            reasons.append(f"{name} is {_too_low(values[name], intervals.get(name), minimum, count)}")
    for name, maximum in params.limits.items():
        if name not in values:
            reasons.append(f"{name} was not measured{_similar(name, values)}")
        elif not values[name] <= maximum:
            reasons.append(f"{name} is {values[name]:.4g}, above {maximum:g}")
    return reasons


def regressions(params: Promote, comparison: Mapping[str, Mapping[str, float]], champion: str) -> list[str]:
    """Reasons from the comparison: metrics on which the model may be worse than the champion by more than allowed."""
    reasons = []
    for name, allowed in params.max_regression.items():
        row = comparison.get(name)
        if row is None:
            reasons.append(f"{name} was not compared with version {champion}{_similar(name, comparison)}")
        elif allowed == "auto":
            if row["high"] < 0:
                reasons.append(f"{name} is worse than that of version {champion}: {change(row)}")
        elif not row["low"] >= -allowed:
            problem = _too_low(row["difference"], row, -allowed, row["prompts"], sign="+")
            reasons.append(f"{name} against version {champion} is {problem}")
    return reasons


def change(row: Mapping[str, float]) -> str:
    """A difference with its interval and the number of pairs or prompts behind it."""
    return f"{_with_interval(row['difference'], row, '+')}, n = {row['count']:.0f}"


def _too_low(
    value: float, bounds: Mapping[str, float] | None, minimum: float, count: float | None, sign: str = ""
) -> str:
    text = _with_interval(value, bounds, sign)
    if bounds is None or not value > minimum:
        return f"{text}, below {minimum:g}"
    needed = prompts_needed(value, bounds["low"], minimum, count or 1)
    how_many = f"{needed:,.0f} prompts, and there are {count:.0f}" if count else f"{needed:.1f} times as many prompts"
    return f"{text}: its lower end counts and is below {minimum:g}, which needs about {how_many}"


def _similar(name: str, known: Iterable[str]) -> str:
    names = [key for key in known if not key.startswith(("intervals/", "tables/"))]
    close = get_close_matches(name, names, 3)
    return f" (similar: {', '.join(close)})" if close else ""


def _with_interval(value: float, bounds: Mapping[str, float] | None, sign: str = "") -> str:
    interval = f" ({bounds['low']:{sign}.3g} to {bounds['high']:{sign}.3g})" if bounds else ""
    return f"{value:{sign}.4g}{interval}"
