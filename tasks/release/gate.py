"""The gate: whether an export may become the champion, and if not, why not. What is not proven does not pass."""

from collections.abc import Mapping
from typing import Any

from tasks.params import Promote
from tasks.tracking.journal import flatten


def gate(params: Promote, metrics: Mapping[str, Any], checks: Mapping[str, Any]) -> list[str]:
    """The absolute limits: reasons against the model, none when it may pass. They decide alone where no champion is."""
    values = by_slash(metrics)
    bounds = metrics.get("intervals", {})
    reasons = [f"the export is not verified: {name} failed" for name, good in checks.items() if good is False]
    for name, least in params.require.items():
        if name not in values:
            reasons.append(_not_measured(name, values))
        elif not bounds.get(name, {"low": values[name]})["low"] >= least:
            reasons.append(f"{name} is {_with_interval(values[name], bounds.get(name))}, below {least:g}")
    for name, most in params.limits.items():
        if name not in values:
            reasons.append(_not_measured(name, values))
        elif not values[name] <= most:
            reasons.append(f"{name} is {values[name]:.4g}, above {most:g}")
    return reasons


def regressions(params: Promote, comparison: Mapping[str, Mapping[str, float]], champion: str) -> list[str]:
    """Where the model may be worse than the champion by more than it is allowed to be."""
    reasons = []
    for name, most in params.max_regression.items():
        if name not in comparison:
            known = ", ".join(comparison) or "nothing"
            reasons.append(f"{name} was not compared with version {champion} (compared: {known})")
        elif not comparison[name]["low"] >= -most:
            found = comparison[name]
            change = _with_interval(found["difference"], found, sign="+")
            reasons.append(f"{name} against version {champion} is {change}, and -{most:g} is allowed")
    return reasons


def by_slash(metrics: Mapping[str, Any]) -> dict[str, float]:
    """evaluate.json as `samples/policy/kind: 0.97`."""
    return {name.replace(".", "/"): value for name, value in flatten(metrics).items()}


def _not_measured(name: str, values: Mapping[str, float]) -> str:
    known = [key for key in values if not key.startswith(("intervals/", "tables/"))]
    return f"{name} was not measured (there are {', '.join(known)})"


def _with_interval(value: float, bounds: Mapping[str, float] | None, sign: str = "") -> str:
    interval = f" ({bounds['low']:{sign}.4g} to {bounds['high']:{sign}.4g})" if bounds else ""
    return f"{value:{sign}.4g}{interval}"
