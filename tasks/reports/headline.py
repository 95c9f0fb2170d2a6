"""A run in one sentence, from what it left in data/metrics."""

from pathlib import Path
from typing import Any

from tasks.config.metrics import accuracy_label
from tasks.config.paths import METRICS, MODEL
from tasks.system.files import read_json, sha256
from tasks.tracking.journal import flatten_metrics

# (metric, label, whether it is a share) of the figures that the report and Prefect's result show first.
HEADLINE_METRICS = (
    ("win_rate", "win rate vs. base model", True),
    ("win_rate/length_controlled", "win rate at equal length", True),
    ("rewards/accuracies", "prefers the chosen answer", True),
    ("rewards/margins", "reward margin", False),
    ("kl/answers", "KL to the base model, nats per answer", False),
    ("calibration/expected_error", "calibration error", False),
    ("health/repetition", "repetition", False),
    ("health/length_ratio", "length vs. base model", False),
)


def decision_of(root: Path) -> dict[str, Any]:
    """The registry's decision about the export in `root`; empty where it was about another export."""
    path, manifest = root / METRICS / "promote.json", root / MODEL / "manifest.json"
    decision = read_json(path) if path.exists() else {}
    return {} if manifest.exists() and decision.get("manifest_sha256") != sha256(manifest) else decision


def verdict(metrics: dict[str, Any], decision: dict[str, Any]) -> tuple[bool, str]:
    """Whether the model was promoted, and a sentence with its quality and the decision."""
    return bool(decision.get("promoted")), f"{_quality(metrics)} {describe_decision(decision)}"


def _quality(metrics: dict[str, Any]) -> str:
    values = flatten_metrics(metrics)
    if "win_rate/rate" in values:
        low, high = values["win_rate/low"], values["win_rate/high"]
        result = "Better than" if low > 0.5 else "Worse than" if high < 0.5 else "No clear difference from"
        rate = values["win_rate/rate"]
        return f"{result} its base model: wins {rate:.1%} ({low:.1%} to {high:.1%}) of judged prompts."
    if "rewards/accuracies" in values:
        bounds = metrics.get("intervals", {}).get("rewards/accuracies")
        interval = f" ({bounds['low']:.1%} to {bounds['high']:.1%})" if bounds else ""
        rows = "rows, both labels counted alike" if "rewards/auc" in values else "pairs"
        share = f"{values['rewards/accuracies']:.1%}{interval}"
        return f"{accuracy_label(values).capitalize()} in {share} of held-out {rows}."
    return "Not evaluated."


def describe_decision(decision: dict[str, Any]) -> str:
    if not decision:
        return "Not registered yet: run `dpo promote`."
    version = f"{decision['model']} version {decision['version']}"
    if decision["promoted"]:
        approved = f", {decision['approved']}" if "approved" in decision else ""
        return f"{version} is {decision['alias']}{approved}."
    if decision["waiting"]:
        return f"{version} passed the gate and waits for approval."
    return f"{version} is not promoted, because {'; '.join(decision['reasons'])}."
