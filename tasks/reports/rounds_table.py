"""What the rounds of `dpo rounds` came to: a row per round, read from the small results of its run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config.params import load_params
from tasks.config.paths import METRICS, SAMPLE
from tasks.evaluation import judges
from tasks.evaluation.win_rate import win_rate
from tasks.system.files import recall

HEAD = ("round", "run", "starts from", "pairs", "win rate vs. start", "vs. first start", "accuracy", "promoted")


def row(number: int, run: str, start: str, results: Path, first: Path) -> dict[str, Any]:
    """The figures of a round; `first` has the results of round 1, whose base model all rounds are compared with."""
    metrics, decision = recall(results / METRICS / "evaluate.json"), recall(results / METRICS / "promote.json")
    sampled = recall(results / SAMPLE / "manifest.json").get("figures", {})
    return {
        "round": number,
        "run": run,
        "start": start,
        "pairs": sampled.get("pairs"),
        "score": sampled.get("score"),  # of the start model's answers, by the judge of `sample`
        "win_rate": metrics.get("win_rate", {}).get("rate"),
        "win_rate_first": _against_first(results, first),
        "accuracy": metrics.get("rewards/accuracies"),
        "promoted": bool(decision.get("promoted")),
        "why": _decision(decision),
    }


def _decision(decision: Mapping[str, Any]) -> str:
    what = f"{decision.get('model')}/{decision.get('version')}"
    if decision.get("promoted"):
        return f"{what} is {decision['alias']}"
    if decision.get("waiting"):
        return f"{what} passed the gate and waits for approval: `dpo approve {what} NAME`"
    return f"{what} is not promoted, because {'; '.join(decision.get('reasons', ['it did not come to the gate']))}"


def _against_first(results: Path, first: Path) -> float | None:
    """The win rate against the first round's base model on the prompts that both answered.

    From the verdicts in both files: no model answers again. A judge that gives no verdicts would have to be asked.
    """
    params = load_params(results / "params.yaml").evaluate
    if params.judge not in ("demo", "reward"):
        return None
    before = {line["prompt"]: line["base"] for line in _samples(first)}
    both = [
        (line["prompt"], before[line["prompt"]], line["policy"])
        for line in _samples(results)
        if line["prompt"] in before
    ]
    if not both:
        return None
    prompts, old, new = map(list, zip(*both, strict=True))
    outcomes = judges.outcomes(params, prompts, old, new) or []
    rate: float | None = win_rate(outcomes, prompts, [0.0] * len(outcomes), params.seed).get("rate")
    return rate


def _samples(results: Path) -> list[dict[str, Any]]:
    path = results / METRICS / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text, in the order of HEAD."""
    rates = ("win_rate", "win_rate_first", "accuracy")
    return [
        (
            *(str(row[name]) for name in ("round", "run", "start")),
            "" if row["pairs"] is None else str(row["pairs"]),
            *("" if row[name] is None else f"{row[name]:.3f}" for name in rates),
            "yes" if row["promoted"] else "no",
        )
        for row in rows
    ]
