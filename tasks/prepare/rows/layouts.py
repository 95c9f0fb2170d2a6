"""How the rows of a file are laid out: row shape, columns, and which answer each vote prefers.

`find_layout` decides it from the first rows of a file, and `decode` gives the preferences that they become: a person
who sees three of them sees a reversed label before anything is trained. Where the rows leave a choice, the UserError
names the settings to write (advice.py).
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.config.prepare import Layout, Prepare
from tasks.errors import UserError
from tasks.prepare.rows.advice import (
    Section,
    Start,
    missing_column,
    unclear_labels,
    unclear_votes,
    unknown_shape,
    unread_values,
)
from tasks.prepare.rows.contract import check_pair
from tasks.prepare.rows.preference import LABELS, PANDALM, Preference, RowLayout
from tasks.prepare.rows.row_shapes import SHAPES, detect_shape, has_column, rename_columns, to_preferences
from tasks.prepare.rows.vote_values import is_fraction, vote_key
from tasks.prepare.rows.votes import Verdict, answer_columns, count_values, known_votes, vote_columns
from tasks.source.reject_reasons import RawRow

AUTO = Layout(format="auto", columns={})
IN_PREPARE = Section()
SAMPLE = 200  # rows to try a shape on
UNKNOWN = 0.1  # largest share of unknown labels that still leaves the others evident


def source_layout(name: str, rows: Sequence[RawRow], file: str, params: Prepare, others: bool = False) -> RowLayout:
    """The layout of the source `name`, by the first rows of its first file."""
    layout = find_layout(rows, file, params.by_source.get(name, params), section_of(name, params, others))
    return replace(layout, expand=params.expand, min_margin=params.min_margin, ties=params.ties)


def section_of(name: str, params: Prepare, others: bool) -> Section:
    """The part of the configuration for a source; `others`: there are further sources, which may have other columns."""
    own = f"prepare.by_source.{name}"
    return Section(own) if name in params.by_source else Section(own=own if others else "")


def find_layout(rows: Sequence[RawRow], file: str, wanted: Layout = AUTO, section: Section = IN_PREPARE) -> RowLayout:
    """The layout of the rows at the start of a file, by the settings `wanted` in `section`, and by the columns."""
    example: RawRow = {}
    for row in rows:
        example |= {name: value for name, value in row.items() if example.get(name) is None}
    start = Start(rows, example, file, wanted, section)
    for ours, theirs in wanted.columns.items():
        if not has_column(example, theirs):
            raise missing_column(start, ours, theirs)
    layout = _decide(start)
    if layout is None:
        raise unknown_shape(start, lambda other: _can_read(start._replace(wanted=other)))
    return layout


def _can_read(start: Start) -> bool:
    try:
        layout = _decide(start)
    except UserError:
        return False
    return layout is not None and bool(decode(start.rows[:SAMPLE], layout))


def _decide(start: Start) -> RowLayout | None:
    """The layout; None if the rows have no known shape."""
    rows, wanted = start.rows, start.wanted
    columns, shape = dict(wanted.columns), wanted.format
    renamed = rename_columns(start.example, columns)
    if shape == "auto":
        shape = detect_shape(renamed) or "votes"
        if shape == "unpaired" and "completion" not in renamed and answer_columns(start.example):
            shape = "votes"  # between two answers; the column beside them is no answer
    if shape == "transcript" and wanted.format == "auto" and all(_is_answer(row.get("chosen")) for row in rows):
        return None  # two answers, and their prompt is in another column
    if shape == "votes" and not SHAPES["votes"].matches(renamed):
        found = vote_columns(rows, start.example)
        if "winner" in columns:
            found = {ours: theirs for ours, theirs in found.items() if ours not in ("score1", "score2")}
        columns = found | columns
        renamed = rename_columns(start.example, columns)
        has_prompt = any(isinstance(renamed.get(name), str | list) for name in ("prompt", "instruction"))
        if not SHAPES["votes"].matches(renamed) or (_is_answer(renamed.get("response1")) and not has_prompt):
            return None
    return RowLayout(shape, columns, _meanings(start, shape, columns))


def _meanings(start: Start, shape: str, columns: Mapping[str, str]) -> Mapping[str, str]:
    """What each vote or label means: as configured, or as the values show."""
    verdict, configured = {"votes": "winner", "unpaired": "label"}.get(shape), start.wanted.values
    if unread := [name for name in configured if name != verdict]:
        raise unread_values(start, shape, unread[0])
    if verdict in configured:
        return {vote_key(value): meaning for value, meaning in configured[verdict].items()}
    if shape == "unpaired":
        return _labels(start, columns)
    return _votes(start, columns) if shape == "votes" else PANDALM


def _votes(start: Start, columns: Mapping[str, str]) -> Mapping[str, str]:
    """What each vote means: evident from the values, documented, or that of PandaLM's own columns."""
    column = columns.get("winner", columns.get("annotator1", "winner"))
    values = count_values(start.rows, column)
    if "score1" in columns or not values:
        return PANDALM
    first, second = (columns.get(side, side) for side in ("response1", "response2"))
    if known := known_votes(values, column, first, second):
        return known
    raise unclear_votes(start, Verdict(column, values, {}, 0), first, second)


def _labels(start: Start, columns: Mapping[str, str]) -> Mapping[str, str]:
    """What each label of an unpaired row means, if that is evident."""
    values = count_values([rename_columns(row, columns) for row in start.rows], "label")
    if sum(count for value, count in values.items() if vote_key(value) not in LABELS) <= UNKNOWN * values.total():
        return LABELS  # rows with another value are rejected one by one
    raise unclear_labels(start, Verdict(columns.get("label", "label"), values, {}, 0))


def _is_answer(value: Any) -> bool:
    """Whether the value is an answer alone, not a transcript, which has its prompt."""
    if isinstance(value, list) and value:
        value = value[0]  # of several
    return isinstance(value, str) and "\n\nHuman:" not in value


def decode(rows: Iterable[RawRow], layout: RowLayout) -> list[Preference]:
    """The valid preferences of these rows."""
    pairs = (pair for row in rows for pair in to_preferences(row, layout))
    return [pair for pair in pairs if isinstance(pair, Preference) and check_pair(pair, sys.maxsize) is None]


def decided_by(rows: Sequence[RawRow], layout: RowLayout) -> str:
    """Which column decides between two answers, and how; its values as the file writes them."""
    if layout.shape != "votes":
        return ""
    if "score1" in layout.columns:
        return f"the higher of `{layout.columns['score1']}` and `{layout.columns['score2']}` wins"
    ours = "winner" if "winner" in layout.columns or "winner" in rows[0] else "annotator1"
    column = layout.columns.get(ours, ours)
    values = count_values(rows, column)
    shown = {value: layout.votes[key] for value in sorted(values) if (key := vote_key(value)) in layout.votes}
    if len(shown) < len(values) and len(layout.votes) <= 4:
        shown = dict(layout.votes)  # of a range
    between = ", fractions lie between" if any(map(is_fraction, values)) else ""
    return f"`{column}`: {', '.join(f'{value} = {meaning}' for value, meaning in shown.items())}{between}"


def better_shape(rows: Sequence[RawRow], layout: RowLayout) -> str | None:
    """Another shape that reads nine of ten of these rows, where this one reads fewer than half."""
    sample = rows[:SAMPLE]

    def readable(shape: str) -> float:
        tried = RowLayout(shape, layout.columns, layout.votes)
        return sum(bool(decode([row], tried)) for row in sample) / len(sample)

    if readable(layout.shape) >= 0.5:
        return None
    return next((shape for shape in SHAPES if shape not in (layout.shape, "unpaired") and readable(shape) >= 0.9), None)
