"""What the rounds of `dpo rounds` came to: a row per round, read from the small results of its run."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tasks.config.params import load_params
from tasks.config.paths import METRICS, SAMPLE
from tasks.evaluation import judges
from tasks.reports.headline import describe_decision
from tasks.system.files import recall

COLUMNS = {"round": "round", "run": "run", "start": "starts from", "pairs": "pairs", "win_rate": "win rate vs. start"}
COLUMNS |= {"win_rate_first": "vs. first start", "accuracy": "accuracy", "promoted": "promoted"}


def row(number: int, run: str, start: str, results: Path, first: Path) -> dict[str, Any]:
    """The figures of a round; `first` has the results of round 1, whose base model all rounds are compared with."""
    metrics, decision = recall(results / METRICS / "evaluate.json"), recall(results / METRICS / "promote.json")
    return {
        "round": number,
        "run": run,
        "start": start,
        "pairs": recall(results / SAMPLE / "manifest.json").get("figures", {}).get("pairs"),
        "win_rate": metrics.get("win_rate", {}).get("rate"),
        "win_rate_first": _against_first(results, first),
        "accuracy": metrics.get("rewards/accuracies"),
        "promoted": bool(decision.get("promoted")),
        "why": describe_decision(decision),
    }


def _against_first(results: Path, first: Path) -> float | None:
    """The win rate against the first round's base model on the prompts that both answered.

    From the verdicts in both files: no model answers again. A judge that gives no verdicts would have to be asked.
    """
    params = load_params(results / "params.yaml").evaluate
    before, after = _answers(first, "base"), _answers(results, "policy")
    prompts = [prompt for prompt in after if prompt in before]
    if params.judge not in ("demo", "reward") or not prompts:
        return None
    outcomes = judges.outcomes(params, prompts, [before[text] for text in prompts], [after[text] for text in prompts])
    return mean(outcome for outcome in outcomes or () if outcome is not None)


def _answers(results: Path, model: str) -> dict[str, dict[str, Any]]:
    path = results / METRICS / "samples.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {line["prompt"]: line[model] for line in lines}


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text, in the order of COLUMNS."""
    words = {None: "", True: "yes", False: "no"}

    def text(value: Any) -> str:
        return words[value] if value is None or isinstance(value, bool) else str(value)

    return [tuple(f"{v:.3f}" if isinstance(v := row[name], float) else text(v) for name in COLUMNS) for row in rows]
