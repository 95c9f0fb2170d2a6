"""Sampled answers to held-out prompts: judge each one, and compare two models' answers to the same prompts."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from tasks.cluster.worker_pool import WorkerPool
from tasks.config.evaluate import Evaluate
from tasks.evaluate import health, judges
from tasks.evaluate.held_out import PairRow
from tasks.evaluate.intervals import mean_interval
from tasks.evaluate.win_rate import win_rate
from training.evaluation.samples import Answer

Record = dict[str, Any]  # an answer with its measurements and the judge's verdicts
NOT_JUDGED = ("text", "tokens", "words")  # the fields of a record that are no verdict


def held_out_prompts(rows: Sequence[PairRow], count: int) -> list[PairRow]:
    """The first `count` different prompts of the held-out set."""
    by_prompt: dict[str, PairRow] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], row)
    return list(by_prompt.values())[:count]


def judge_answers(
    workers: WorkerPool, params: Evaluate, prompts: Sequence[PairRow], answers: Sequence[Answer]
) -> list[Record]:
    texts = [answer.text for answer in answers]
    verdicts = judges.verdicts(workers, params, [row["prompt"] for row in prompts], texts)
    return [
        {
            "text": answer.text,
            "tokens": answer.tokens,
            "finished": answer.finished,
            "words": len(answer.text.split()),
            **verdict,
        }
        for answer, verdict in zip(answers, verdicts, strict=True)
    ]


def summary(answers: Sequence[Record]) -> dict[str, float]:
    """The mean of each measurement, and the variety of the texts."""
    means = {name: round(mean(float(answer[name]) for answer in answers), 4) for name in answers[0] if name != "text"}
    return {**means, **health.variety([answer["text"] for answer in answers])}


def compare_answers(
    params: Evaluate, prompts: Sequence[PairRow], base: Sequence[Record], policy: Sequence[Record]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The metrics of two models' answers to the same prompts, and a line of samples.jsonl per prompt."""
    texts = [row["prompt"] for row in prompts]
    outcomes = judges.outcomes(params, texts, base, policy)
    before, after = summary(base), summary(policy)
    metrics: dict[str, Any] = {
        "samples": {"base": before, "policy": after},
        "health": health.drift(before, after),
        "intervals": {f"samples/policy/{name}": _interval(policy, name, texts) for name in judged_metrics(policy)},
    }
    if outcomes is not None:
        longer = [float(b["tokens"] - a["tokens"]) for a, b in zip(base, policy, strict=True)]
        metrics["win_rate"] = win_rate(outcomes, texts, longer)
    lines = [
        {"id": row["id"], "prompt": row["prompt"], "base": a, "policy": b}
        for row, a, b in zip(prompts, base, policy, strict=True)
    ]
    for line, outcome in zip(lines, outcomes or (), strict=bool(outcomes)):
        line["outcome"] = outcome
    return metrics, lines


def judged_metrics(answers: Sequence[Record]) -> list[str]:
    """The names of an answer's verdicts; `finished` counts as one."""
    return [name for name in answers[0] if name not in NOT_JUDGED]


def _interval(answers: Sequence[Record], name: str, prompts: Sequence[str]) -> dict[str, float]:
    values = [answer[name] for answer in answers]
    limits = (0.0, 1.0) if isinstance(values[0], bool) else None
    return mean_interval([float(value) for value in values], prompts, limits).bounds()
