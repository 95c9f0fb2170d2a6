"""Answers to held-out prompts: judged, and put side by side."""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from tasks.evaluation import health, judges
from tasks.evaluation.bootstrap import mean_interval
from tasks.evaluation.win_rate import win_rate
from tasks.machines.pool import Workers
from tasks.params import Evaluate
from training.outputs import Answer

Row = dict[str, Any]  # of the pairs artefact
Record = dict[str, Any]  # an answer with what is known of it
MEASURED = ("tokens", "words")  # of an answer, besides the judge's verdicts


def held_out_prompts(rows: Sequence[Row], count: int) -> list[Row]:
    """The first held-out prompts, each once."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row["prompt"], row)
    return list(found.values())[:count]


def records(workers: Workers, params: Evaluate, prompts: Sequence[Row], answers: Sequence[Answer]) -> list[Record]:
    said = judges.verdicts(workers, params, [row["prompt"] for row in prompts], [answer.text for answer in answers])
    return [
        {
            "text": answer.text,
            "tokens": answer.tokens,
            "finished": answer.finished,
            "words": len(answer.text.split()),
            **verdict,
        }
        for answer, verdict in zip(answers, said, strict=True)
    ]


def summary(answers: Sequence[Record]) -> dict[str, float]:
    """Means over answers, and how varied they are."""
    means = {name: round(mean(float(answer[name]) for answer in answers), 4) for name in answers[0] if name != "text"}
    return {**means, **health.variety([answer["text"] for answer in answers])}


def side_by_side(
    params: Evaluate,
    prompts: Sequence[Row],
    before: Sequence[Record],
    after: Sequence[Record],
    report: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The metrics of two models' answers to the same prompts, and the answers in one line per prompt."""
    texts = [row["prompt"] for row in prompts]
    found = judges.outcomes(params, texts, before, after, report)
    old, new = summary(before), summary(after)
    metrics: dict[str, Any] = {"samples": {"base": old, "policy": new}, "health": health.drift(old, new)}
    intervals = {f"samples/policy/{name}": _interval(after, name, texts, params.seed) for name in judged(after)}
    metrics["intervals"] = intervals
    if found is not None:
        lengths = [float(b["tokens"] - a["tokens"]) for a, b in zip(before, after, strict=True)]
        metrics["win_rate"] = win_rate(found, texts, lengths, params.seed)
    lines = [
        {"id": row["id"], "prompt": row["prompt"], "base": a, "policy": b, **({"outcome": o} if found else {})}
        for row, a, b, o in zip(prompts, before, after, found or [None] * len(prompts), strict=True)
    ]
    return metrics, lines


def judged(answers: Sequence[Record]) -> list[str]:
    """The names of what was measured of each answer."""
    return [name for name in answers[0] if name not in ("text", *MEASURED)]


def _interval(answers: Sequence[Record], name: str, prompts: Sequence[str], seed: int) -> dict[str, float]:
    values = [answer[name] for answer in answers]
    limits = (0.0, 1.0) if isinstance(values[0], bool) else None
    return mean_interval([float(value) for value in values], prompts, seed, limits).bounds()
