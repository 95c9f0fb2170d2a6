"""Answers that are ranked, scored or voted on, as pairs."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from tasks.dataset.conversations import Choices, Conversation, Pairing, Row, asked, number
from tasks.dataset.messages import to_messages
from tasks.dataset.violations import BadRow


def by_score(conversation: Conversation, row: Row, choices: Choices) -> Pairing:
    if row.get("score_chosen") is None or row.get("score_rejected") is None:
        return conversation
    better, worse = number(row["score_chosen"], "score_chosen"), number(row["score_rejected"], "score_rejected")
    return _scored_pair(conversation, better - worse, choices)


def _scored_pair(conversation: Conversation, margin: float, choices: Choices) -> Pairing:
    if margin == 0.0:
        return BadRow("tie") if choices.ties == "drop" else replace(conversation, label=0.5)
    if abs(margin) < choices.min_margin:
        return BadRow("small_margin", f"{margin:g}")
    if margin < 0.0:
        return BadRow("bad_number", f"rejected scores {-margin:g} more than chosen")
    return replace(conversation, margin=margin)


def votes(row: Row, choices: Choices) -> list[Pairing]:
    """PandaLM: response1, response2, and votes annotator1, annotator2, ...: 1 or 2 is the better one, 0 a tie."""
    said = [value for name, value in row.items() if name.startswith("annotator") and value is not None]
    if not said or any(vote not in (0, 1, 2) for vote in said):
        raise BadRow("bad_number", f"votes {said}")
    first = sum({0: 0.5, 1: 1.0, 2: 0.0}[vote] for vote in said) / len(said)
    sides = [to_messages(row[side], side, "assistant") for side in ("response1", "response2")]
    prompt = asked(row)
    if first == 0.5 and choices.ties == "drop":
        return [BadRow("tie")]
    better, worse = sides if first >= 0.5 else sides[::-1]
    return [Conversation(prompt, better, worse, label=max(first, 1.0 - first))]


def ranked(row: Row, choices: Choices) -> list[Pairing]:
    """Several answers to one prompt, the best first; or with scores, in any order."""
    answers = row["completions"]
    if not isinstance(answers, list) or len(answers) < 2:
        raise BadRow("not_text", "completions is not a list of two or more answers")
    scores = row.get("scores")
    if scores is None and all(isinstance(answer, dict) and _score_key(answer) for answer in answers):
        scores = [answer[_score_key(answer)] for answer in answers]
    texts = [to_messages(_answer_text(answer), "completions", "assistant") for answer in answers]
    prompt = asked(row)
    if scores is None:
        order = list(range(len(texts)))
        return [Conversation(prompt, texts[a], texts[b]) for a, b in _expand(order, choices.expand)]
    if not isinstance(scores, list) or len(scores) != len(texts):
        raise BadRow("bad_number", f"{len(texts)} completions and scores {scores}")
    numbers = [number(score, "scores") for score in scores]
    order = sorted(range(len(texts)), key=lambda place: (-numbers[place], place))
    return [
        _scored_pair(Conversation(prompt, texts[a], texts[b]), numbers[a] - numbers[b], choices)
        for a, b in _expand(order, choices.expand)
    ]


def alpaca(row: Row, choices: Choices) -> list[Pairing]:
    """instruction, input, and a list `output`, the best first."""
    return ranked({**row, "completions": row["output"]}, choices)


def _expand(order: list[int], how: str) -> list[tuple[int, int]]:
    """Pairs (better, worse) of answers in the order of their rank."""
    if how == "all":
        return list(combinations(order, 2))
    return list(pairwise(order)) if how == "adjacent" else [(order[0], rest) for rest in order[1:]]


def _answer_text(answer: Any) -> Any:
    """An answer that is an object carries its text under one of these names."""
    if not isinstance(answer, dict) or "role" in answer or "from" in answer:
        return answer
    return next((answer[name] for name in ("response", "text", "content", "completion") if name in answer), None)


def _score_key(answer: dict[str, Any]) -> str | None:
    return next((name for name in ("score", "overall_score", "rating", "reward") if name in answer), None)
