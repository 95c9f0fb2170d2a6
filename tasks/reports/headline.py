"""A run in one sentence, from data/metrics."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.config.metrics import ACCURACY, accuracy_label, interval
from tasks.config.paths import METRICS, MODEL
from tasks.system.files import read_json_or_empty, sha256
from tasks.tracking.journal import flatten_metrics


def decision_of(root: Path) -> dict[str, Any]:
    """The registry's decision about the export in `root`; empty where it was about another export."""
    decision, manifest = read_json_or_empty(root / METRICS / "promote.json"), root / MODEL / "manifest.json"
    return {} if manifest.exists() and decision.get("manifest_sha256") != sha256(manifest) else decision


def verdict(metrics: dict[str, Any], decision: dict[str, Any]) -> tuple[bool, str]:
    """Whether the model was promoted, and a sentence with its quality and the decision."""
    return bool(decision.get("promoted")), f"{_quality(metrics)} {describe_decision(decision)}"


def _quality(metrics: dict[str, Any]) -> str:
    values = flatten_metrics(metrics)
    if "win_rate/rate" in values:
        low, high = values["win_rate/low"], values["win_rate/high"]
        result = "Better than" if low > 0.5 else "Worse than" if high < 0.5 else "No clear difference from"
        return f"{result} its base model: wins {share(values, 'win_rate/rate')} of judged prompts."
    if ACCURACY in values:
        rows = "rows, both labels counted alike" if "rewards/auc" in values else "pairs"
        return f"{accuracy_label(values).capitalize()} in {share(values, ACCURACY)} of held-out {rows}."
    return "Not evaluated."


def share(values: Mapping[str, float], name: str) -> str:
    """A metric in percent, with its interval if it has one."""
    bounds = interval(values, name)
    return f"{values[name]:.1%}" + (f" ({bounds[0]:.1%} to {bounds[1]:.1%})" if bounds else "")


def describe_decision(decision: dict[str, Any]) -> str:
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
