"""Votes between two answers: which columns hold the answers, and which one says who wins.

The columns of the two answers have names that differ only in their end: response_a and response_b, output_1 and
output_2, answer_0 and answer_1.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tasks.prepare.rows.row_shapes import has_column, value_of
from tasks.prepare.rows.vote_values import evident_votes, is_fraction, vote_key
from tasks.source.reject_reasons import RawRow

ANSWERS = re.compile(r"(.*?)(response|answer|output|completion|conversation|human_ref|summary)([ _-]?)([1aA0])")
SECOND = {"1": "2", "0": "1", "a": "b", "A": "B"}
# Words in the name of a column that says who wins, the most specific first; `upvote_ratio` has none of them.
WINNER = ("win|winners?", "better", "prefer|preferred|preferences?", "choices?", "votes?", "verdicts?", "labels?")
PROMPTS = ("prompt", "instruction", "question", "input", "history", "context")
MAX_VALUES = 5  # of a vote whose meaning is not evident; a column with more of them holds something else
# What a data set's card says of values that are not evident, by the columns of the first answer and of the vote: SHP.
DOCUMENTED = {("human_ref_A", "labels"): {"1": "first", "0": "second"}}


class Verdict(NamedTuple):
    """A column that may say which answer is better."""

    column: str
    values: Counter[str]
    meaning: Mapping[str, str]  # empty if it is not evident
    rank: int  # of the word in its name


def vote_columns(rows: Sequence[RawRow], example: RawRow) -> dict[str, str]:
    """Our names of the columns with two answers, what decides between them, and their prompt, where there is one."""
    answers = answer_columns(example)
    if answers is None:
        return {}
    match, second = answers
    columns = {"response1": match[0], "response2": second}
    prompts = (name for start in (match[1], "") for name in (start + word for word in PROMPTS) if name in example)
    if prompt := next((name for name in prompts if isinstance(example[name], str | list)), None):
        columns["prompt"] = prompt
    winner, scores = winner_column(verdicts(rows, example, match[0], second)), _score_columns(example, match[4])
    if scores and not (winner and evident_votes(count_values(rows, winner), match[0], second)):
        return columns | scores
    return columns | ({"winner": winner} if winner else {})


def answer_columns(example: RawRow) -> tuple[re.Match[str], str] | None:
    """The column with the first of two answers, as a match of ANSWERS, and the one with the second."""
    matches = (match for name in example if (match := ANSWERS.fullmatch(str(name))))
    return next(((m, m[0][:-1] + SECOND[m[4]]) for m in matches if m[0][:-1] + SECOND[m[4]] in example), None)


def verdicts(rows: Sequence[RawRow], example: RawRow, first: str, second: str) -> list[Verdict]:
    """The columns with such a name whose values are evident or few, discrete and not all the same."""
    found = []
    for name in map(str, example):
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
        ranks = (rank for rank, word in enumerate(WINNER) if any(re.fullmatch(word, w.lower()) for w in words))
        if (rank := next(ranks, None)) is not None:
            values = count_values(rows, name)
            meaning = known_votes(values, name, first, second)
            if meaning or _are_votes(values):
                found.append(Verdict(name, values, meaning, rank))
    return sorted(found, key=lambda verdict: verdict.rank)


def winner_column(found: Sequence[Verdict]) -> str | None:
    """The column that decides: the only one, or the evident one with the most specific name."""
    best = [verdict for verdict in found if verdict.rank == found[0].rank]
    return best[0].column if len(found) == 1 or (len(best) == 1 and best[0].meaning) else None


def known_votes(values: Counter[str], column: str, first: str, second: str) -> Mapping[str, str]:
    """What each value of a vote means, if the values show it or the data set's documentation says it; otherwise {}."""
    documented = DOCUMENTED.get((first, column), {})
    return evident_votes(values, first, second) or (documented if documented.keys() >= {*map(vote_key, values)} else {})


def _are_votes(values: Counter[str]) -> bool:
    """A few different values, of which none is a fraction."""
    return 1 < len(values) <= MAX_VALUES and not any(map(is_fraction, values))


def _score_columns(example: RawRow, end: str) -> dict[str, str]:
    """Two columns of numbers such as score_A and score_B, or winner_model_a and winner_model_b with 0 and 1."""
    first = [name for name in map(str, example) if re.search(rf"(score|rating|reward|winner)\w*_{end}$", name)]
    second = {name: name[:-1] + SECOND[end] for name in first}
    return next(({"score1": name, "score2": second[name]} for name in first if second[name] in example), {})


def count_values(rows: Sequence[RawRow], column: str) -> Counter[str]:
    """How often each value occurs, as the file writes it; nothing where the column holds long texts or lists."""
    values = [value_of(row, column) for row in rows if has_column(row, column)]
    if any(isinstance(value, list | dict) or len(str(value)) > 40 for value in values):
        return Counter()
    written: dict[str, str] = {}  # values that differ in case, or as 1 and 1.0 do, are one
    return Counter(written.setdefault(vote_key(value), str(value)) for value in values if value is not None)
