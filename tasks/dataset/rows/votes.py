"""Votes between two answers: which columns hold them, and which answer each value prefers.

The columns of the two answers have names that differ only in their end: response_a and response_b, output_1 and
output_2, answer_0 and answer_1. A value that ends like one of the names prefers that answer.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.dataset.rows.rankings import vote_key
from tasks.dataset.rows.reject_reasons import RawRow
from tasks.dataset.rows.row_shapes import has_column, value_of

ANSWERS = re.compile(r"(.*?)(response|answer|output|completion|conversation|human_ref|summary)([ _-]?)([1aA0])")
SECOND = {"1": "2", "0": "1", "a": "b", "A": "B"}
WINNER = ("winner", "better", "preference", "choice", "vote", "verdict", "label")  # most specific first
PROMPTS = ("prompt", "instruction", "question", "input", "history", "context")
TIES = ("tie", "both", "neither", "equal", "draw", "same")
MAX_VALUES = 12  # a column with more values holds no votes


def vote_columns(rows: Sequence[RawRow], example: RawRow) -> dict[str, str]:
    """Our names of the columns with two answers, what decides between them, and their prompt, where there is one."""
    matches = (match for name in example if (match := ANSWERS.fullmatch(str(name))))
    answers = next(((m, m[0][:-1] + SECOND[m[4]]) for m in matches if m[0][:-1] + SECOND[m[4]] in example), None)
    if answers is None:
        return {}
    match, second = answers
    columns = {"response1": match[0], "response2": second}
    prompts = (name for start in (match[1], "") for name in (start + word for word in PROMPTS) if name in example)
    if prompt := next((name for name in prompts if isinstance(example[name], str | list)), None):
        columns["prompt"] = prompt
    winner, scores = winner_column(rows, example), _score_columns(example, match[4])
    if scores and not (winner and evident_votes(count_values(rows, winner), match[0], second)):
        return columns | scores
    return columns | ({"winner": winner} if winner else {})


def winner_column(rows: Sequence[RawRow], example: RawRow) -> str | None:
    """The first column with such a name and a few short values."""
    named = (name for word in WINNER for name in example if word in str(name).lower())
    return next((name for name in named if 0 < len(count_values(rows, name)) <= MAX_VALUES), None)


def _score_columns(example: RawRow, end: str) -> dict[str, str]:
    """Two columns of numbers such as score_A and score_B, or winner_model_a and winner_model_b with 0 and 1."""
    first = [name for name in map(str, example) if re.search(rf"(score|rating|reward|winner)\w*_{end}$", name)]
    second = {name: name[:-1] + SECOND[end] for name in first}
    return next(({"score1": name, "score2": second[name]} for name in first if second[name] in example), {})


def count_values(rows: Sequence[RawRow], column: str) -> Counter:
    """How often each value occurs; nothing where the column holds long texts or lists."""
    values = [value_of(row, column) for row in rows if has_column(row, column)]
    if any(isinstance(value, list | dict) or len(str(value)) > 40 for value in values):
        return Counter()
    return Counter(vote_key(value) for value in values if value is not None)


def evident_votes(values: Mapping[str, Any], first: str, second: str) -> dict[str, str]:
    """first, second or tie for each value, if the values end like the names of the answers' columns; otherwise {}.

    A and B, 1 and 2 are clear for any names. 0 and 1 are clear only where the columns are numbered so, and 0, 1 and 2
    never: one of them is a tie, and data sets differ in which.
    """
    ties = [value for value in values if value.startswith(TIES)]
    sides = [value for value in values if value not in ties]
    for ends in ((first[-1].lower(), second[-1].lower()), ("a", "b"), ("1", "2"), ("first", "second")):
        patterns = {end: re.compile(rf"(?:\w+[ _-])?{end}") for end in ends}
        matches = {side: next((end for end in ends if patterns[end].fullmatch(side)), None) for side in sides}
        if None not in matches.values() and (set(matches.values()) == set(ends) or not ends[0].isdigit()) and sides:
            meaning = dict(zip(ends, ("first", "second"), strict=True))
            stems = [side.removesuffix(end) for side, end in matches.items() if end]
            known = {f"{stem}{end}": meaning[end] for stem in stems for end in ends}
            return known | dict.fromkeys((*TIES, "tie (bothbad)", *ties), "tie")
    return {}
