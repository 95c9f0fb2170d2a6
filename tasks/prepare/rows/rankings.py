"""Pairs from answers with ranks, scores or votes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from tasks.prepare.rows.messages import prompt_messages, require_number, to_messages
from tasks.prepare.rows.preference import MaybePreference, Preference, RowLayout
from tasks.prepare.rows.vote_values import read_vote
from tasks.source.reject_reasons import RawRow, RejectedRow


def apply_scores(preference: Preference, row: RawRow, layout: RowLayout) -> MaybePreference:
    """The preference with the margin of its two scores, where the row has both."""
    if row.get("score_chosen") is None or row.get("score_rejected") is None:
        return preference
    chosen, rejected = (require_number(row[column], column) for column in ("score_chosen", "score_rejected"))
    return _with_margin(preference, chosen - rejected, layout)


def _with_margin(preference: Preference, margin: float, layout: RowLayout) -> MaybePreference:
    if margin == 0.0:
        return RejectedRow("tie") if layout.ties == "drop" else replace(preference, label=0.5)
    if abs(margin) < layout.min_margin:
        return RejectedRow("small_margin", f"{margin:g}")
    if margin < 0.0:
        return RejectedRow("bad_number", f"rejected scores {-margin:g} more than chosen")
    return replace(preference, margin=margin)


def compare_two(row: RawRow, layout: RowLayout) -> tuple[RawRow, float]:
    """Two answers and what decides between them, two scores or votes, as (row with chosen and rejected, label)."""
    sides = row["completions"] if "response1" not in row else [row["response1"], row["response2"]]
    if not isinstance(sides, list) or len(sides) != 2:
        raise RejectedRow("not_text", "completions is not a list of two answers")
    sides = [answer_text(side) for side in sides]
    if "score1" in layout.columns or ("score1" in row and "winner" not in row):
        scores = [require_number(row[column], column) for column in ("score1", "score2")]
        order = (0, 1) if scores[0] >= scores[1] else (1, 0)
        named = {f"score_{side}": scores[at] for side, at in zip(("chosen", "rejected"), order, strict=True)}
        return {**row, **named, "chosen": sides[order[0]], "rejected": sides[order[1]]}, 1.0
    first, strength = _votes_for_first(row, layout.votes)
    if first == 0.5 and layout.ties == "drop":
        raise RejectedRow("tie")
    better, worse = sides if first >= 0.5 else sides[::-1]
    rated = {"score_chosen": strength, "score_rejected": 0.0} if strength else {}
    return {**rated, **row, "chosen": better, "rejected": worse}, max(first, 1.0 - first)


def _votes_for_first(row: RawRow, meaning: Mapping[str, str]) -> tuple[float, float]:
    """The share of the votes for the first answer, of which a tie counts half; and the mean strength of ratings."""
    named = ["winner"] if "winner" in row else [name for name in row if str(name).startswith("annotator")]
    votes = [read_vote(row[name], meaning) for name in named if row[name] is not None]
    if not votes:
        raise RejectedRow("bad_number", "there is no vote")
    share, strength = (sum(values) / len(votes) for values in zip(*votes, strict=True))
    return share, strength


def from_ranking(row: RawRow, layout: RowLayout) -> list[MaybePreference]:
    """Several answers to one prompt: best first, or in any order with scores."""
    answers = row["completions"]
    if not isinstance(answers, list) or len(answers) < 2:
        raise RejectedRow("not_text", "completions is not a list of two or more answers")
    scores = row.get("scores")
    if scores is None and all(isinstance(answer, dict) and _score_key(answer) for answer in answers):
        key = str(_score_key(answers[0]))
        scores = [answer.get(key) for answer in answers]
        if key == "rank":  # 1 is the best
            scores = [-require_number(rank, key) for rank in scores]
    texts = [to_messages(answer_text(answer), "completions", "assistant") for answer in answers]
    prompt = prompt_messages(row, "instruction", "prompt")
    if scores is None:
        pairs = expand(range(len(texts)), layout.expand)
        return [Preference(prompt, texts[better], texts[worse]) for better, worse in pairs]
    if not isinstance(scores, list) or len(scores) != len(texts):
        raise RejectedRow("bad_number", f"{len(texts)} completions and scores {scores}")
    numbers = [require_number(score, "scores") for score in scores]
    pairs = expand(sorted(range(len(texts)), key=lambda index: -numbers[index]), layout.expand)
    return [
        _with_margin(Preference(prompt, texts[better], texts[worse]), numbers[better] - numbers[worse], layout)
        for better, worse in pairs
    ]


def expand(order: Sequence[int], how: str) -> Iterable[tuple[int, int]]:
    """Pairs (better, worse) of answers that are sorted best first."""
    if how == "all":
        return combinations(order, 2)
    return pairwise(order) if how == "adjacent" else ((order[0], worse) for worse in order[1:])


def answer_text(answer: Any) -> Any:
    """An answer that is an object holds its text under one of these keys."""
    if not isinstance(answer, dict) or "role" in answer or "from" in answer:
        return answer
    names = ("response", "text", "content", "completion", "answer")
    return next((answer[name] for name in names if name in answer), None)


def _score_key(answer: dict[str, Any]) -> str | None:
    names = ("score", "overall_score", "rating", "reward", "pm_score", "rank")
    return next((name for name in names if name in answer), None)
