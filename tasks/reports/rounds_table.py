"""The results of `dpo rounds`: a row per round, from the results folder of its run."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from tasks.config.metrics import ACCURACY
from tasks.config.params import load_stored_params
from tasks.evaluate import judges
from tasks.reports.headline import describe_decision
from tasks.reports.summary import RunSummary

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


def row(number: int, run: RunSummary, start: str, first: RunSummary) -> dict[str, Any]:
    """The figures of a round; all rounds are compared with the base model of the first one."""
    return {
        "round": number,
        "run": run.name,
        "start": start,
        "pairs": run.sampled.get("figures", {}).get("pairs"),
        "win_rate": run.values.get("win_rate/rate"),
        "win_rate_first": _against_first(run, first),
        "accuracy": run.values.get(ACCURACY),
        "promoted": bool(run.decision.get("promoted")),
        "why": describe_decision(run.decision),
    }


def _against_first(run: RunSummary, first: RunSummary) -> float | None:
    """The win rate against the first round's base model on the prompts that both answered.

    From the verdicts in both files: no model answers again. A judge that gives no verdicts would have to be asked.
    """
    params = load_stored_params(run.root / "params.yaml").evaluate
    before, after = _answers(first, "base"), _answers(run, "policy")
    prompts = [prompt for prompt in after if prompt in before]
    if params.judge not in ("demo", "reward") or not prompts:
        return None
    outcomes = judges.outcomes(params, prompts, [before[text] for text in prompts], [after[text] for text in prompts])
    return mean(outcome for outcome in outcomes or () if outcome is not None)


def _answers(run: RunSummary, model: str) -> dict[str, dict[str, Any]]:
    return {sample["prompt"]: sample[model] for sample in run.samples}


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text, in the order of COLUMNS."""
    return [tuple(_text(row[name]) for name in COLUMNS) for row in rows]


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:.3f}" if isinstance(value, float) else str(value)
