"""A run in one sentence, from what it left in data/metrics."""

from pathlib import Path
from typing import Any

from tasks.files import read_json, sha256
from tasks.paths import METRICS, MODEL
from tasks.release.gate import by_slash


def decision_of(root: Path) -> dict[str, Any]:
    """The registry's decision about the export that is here; none where it was about another."""
    decision, manifest = root / METRICS / "promote.json", root / MODEL / "manifest.json"
    found = read_json(decision) if decision.exists() else {}
    return {} if manifest.exists() and found.get("manifest_sha256") != sha256(manifest) else found


def verdict(metrics: dict[str, Any], decision: dict[str, Any]) -> tuple[bool, str]:
    """Whether the model is fit to use, and the sentence that says so."""
    return bool(decision.get("promoted")), f"{measured(metrics)} {decided(decision)}"


def measured(metrics: dict[str, Any]) -> str:
    values = by_slash(metrics)
    if "win_rate/rate" in values:
        low, high = values["win_rate/low"], values["win_rate/high"]
        than = "Better than" if low > 0.5 else "Worse than" if high < 0.5 else "Not told apart from"
        return f"{than} its base model: wins {values['win_rate/rate']:.1%} ({low:.1%} to {high:.1%}) of judged prompts."
    if "rewards/accuracies" in values:
        bounds = metrics.get("intervals", {}).get("rewards/accuracies")
        interval = f" ({bounds['low']:.1%} to {bounds['high']:.1%})" if bounds else ""
        return f"Prefers the chosen answer in {values['rewards/accuracies']:.1%}{interval} of held-out pairs."
    return "Not evaluated."


def decided(decision: dict[str, Any]) -> str:
    if not decision:
        return "Not put into the registry yet: `make promote`."
    what = f"{decision['model']} version {decision['version']}"
    if decision["promoted"]:
        return f"{what} is {decision['alias']}."
    if decision["waiting"]:
        return f"{what} passed the gate and waits for a person."
    return f"{what} is not promoted, because {'; '.join(decision['reasons'])}."
