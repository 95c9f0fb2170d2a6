"""The results of `dpo rounds`: a row per round, from the results folder of its run."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tasks.config.params import load_stored_params
from tasks.config.paths import METRICS, SAMPLE
from tasks.evaluate import judges
from tasks.reports.headline import describe_decision
from tasks.system.files import read_json_lines, read_json_or_empty

COLUMNS = {
    "round": "round",
    "run": "run",
    "start": "starts from",
    "pairs": "pairs",
    "win_rate": "win rate vs. start",
    "win_rate_first": "vs. first start",
    "accuracy": "accuracy",
    "promoted": "promoted",
}


def row(number: int, run: str, start: str, results: Path, first: Path) -> dict[str, Any]:
    """The figures of a round; `first` has the results of round 1, whose base model all rounds are compared with."""
    metrics, decision = (
        read_json_or_empty(results / METRICS / "evaluate.json"),
        read_json_or_empty(results / METRICS / "promote.json"),
    )
    return {
        "round": number,
        "run": run,
        "start": start,
        "pairs": read_json_or_empty(results / SAMPLE / "manifest.json").get("figures", {}).get("pairs"),
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
    params = load_stored_params(results / "params.yaml").evaluate
    before, after = _answers(first, "base"), _answers(results, "policy")
    prompts = [prompt for prompt in after if prompt in before]
    if params.judge not in ("demo", "reward") or not prompts:
        return None
    outcomes = judges.outcomes(params, prompts, [before[text] for text in prompts], [after[text] for text in prompts])
    return mean(outcome for outcome in outcomes or () if outcome is not None)


def _answers(results: Path, model: str) -> dict[str, dict[str, Any]]:
    path = results / METRICS / "samples.jsonl"
    return {line["prompt"]: line[model] for line in read_json_lines(path)} if path.exists() else {}


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text, in the order of COLUMNS."""
    return [tuple(_text(row[name]) for name in COLUMNS) for row in rows]


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:.3f}" if isinstance(value, float) else str(value)
