"""A run in one sentence: its quality, and the registry's decision."""

from collections.abc import Mapping
from typing import Any

from tasks.artifacts.evaluation import accuracy_label, interval, is_unpaired, with_interval
from tasks.config.metrics import ACCURACY


def verdict(values: Mapping[str, float], decision: Mapping[str, Any]) -> str:
    """From the evaluation by flat name."""
    return f"{_quality(values)} {describe_decision(decision)}"


def _quality(values: Mapping[str, float]) -> str:
    if "win_rate/rate" in values:
        low, high = values["win_rate/low"], values["win_rate/high"]
        result = "Better than" if low > 0.5 else "Worse than" if high < 0.5 else "No clear difference from"
        return f"{result} its base model: wins {share(values, 'win_rate/rate')} of judged prompts."
    if ACCURACY in values:
        rows = "rows, both labels counted alike" if is_unpaired(values) else "pairs"
        return f"{accuracy_label(values).capitalize()} in {share(values, ACCURACY)} of held-out {rows}."
    return "Not evaluated."


def share(values: Mapping[str, float], name: str) -> str:
    """A metric in percent, with its interval if it has one."""
    return with_interval(values[name], interval(values, name), ".1%")


def describe_decision(decision: Mapping[str, Any]) -> str:
    if not decision:
        return "Not registered yet: run `dpo promote`."
    version = f"{decision['model']} version {decision['version']}"
    if decision["promoted"]:
        approved = f", {decision['approved']}" if "approved" in decision else ""
        return f"{version} is {decision['alias']}{approved}."
    if decision["waiting"]:
        rollback = f" but was rolled back on {decision['rolled_back']}" if decision.get("rolled_back") else ""
        command = f"dpo approve {decision['model']}/{decision['version']} NAME"
        return f"{version} passed the gate{rollback} and waits for approval: `{command}`."
    return f"{version} is not promoted, because {'; '.join(decision['reasons'])}."
