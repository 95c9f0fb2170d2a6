"""How the rows of a file are laid out: row shape, columns, and which answer each vote prefers.

`find_layout` decides it from the first rows of a file, and `decode` gives the preferences that they become: a person
who sees three of them sees a reversed label before anything is trained. Where the rows leave a choice, the UserError
names the settings to write.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.config.params import Layout, Prepare
from tasks.dataset.rows.contract import check_pair
from tasks.dataset.rows.preference import LABELS, PANDALM, Preference, RowLayout
from tasks.dataset.rows.rankings import vote_key
from tasks.dataset.rows.reject_reasons import RawRow
from tasks.dataset.rows.row_shapes import SHAPES, detect_shape, has_column, rename_columns, to_preferences
from tasks.dataset.rows.votes import count_values, evident_votes, vote_columns, winner_column
from tasks.errors import UserError

AUTO = Layout(format="auto", columns={})
SAMPLE = 200  # rows to try a shape on
UNKNOWN = 0.1  # largest share of unknown labels that still leaves the others evident
# Words in the names of columns, for suggestions; the rejected answer first, since `dispreferred` has both.
HINTS = {
    "rejected": re.compile(r"reject|dispref|non_?pref|bad|worse|worst|los[et]|negative"),
    "chosen": re.compile(r"chosen|prefer|accept|good|better|best|win|positive"),
    "prompt": re.compile(r"prompt|instruction|question|query|context|history|post|input|full_text"),
    "completions": re.compile(r"completion|response|answer|summar|candidate|generation|output"),
}


def source_layout(name: str, rows: Sequence[RawRow], file: str, params: Prepare) -> RowLayout:
    """The layout of the source `name`, by the first rows of its first file."""
    layout = find_layout(rows, file, params.by_source.get(name, params))
    return replace(layout, expand=params.expand, min_margin=params.min_margin, ties=params.ties)


def find_layout(rows: Sequence[RawRow], file: str, wanted: Layout = AUTO) -> RowLayout:
    """The layout of the rows at the start of a file, by the settings `wanted` and by the columns."""
    example: RawRow = {}
    for row in rows:
        example |= {name: value for name, value in row.items() if example.get(name) is None}
    for ours, theirs in wanted.columns.items():
        if not has_column(example, theirs):
            raise UserError(
                f"prepare.columns maps {ours} to `{theirs}`, but {file} has no such column. "
                f"It has: {', '.join(map(str, example))}."
            )
    columns, shape = dict(wanted.columns), wanted.format
    if shape == "auto":
        shape = detect_shape(rename_columns(example, columns)) or "votes"
    if shape == "transcript" and wanted.format == "auto" and all(_is_answer(row.get("chosen")) for row in rows):
        raise _unknown(rows, example, file)  # two answers, and their prompt is in another column
    if shape == "votes" and not SHAPES["votes"].matches(rename_columns(example, columns)):
        columns = vote_columns(rows, example) | columns
        renamed = rename_columns(example, columns)
        has_prompt = any(isinstance(renamed.get(name), str | list) for name in ("prompt", "instruction"))
        if not SHAPES["votes"].matches(renamed) or (_is_answer(renamed.get("response1")) and not has_prompt):
            raise _unknown(rows, example, file)
    verdict = {"votes": "winner", "unpaired": "label"}.get(shape)
    if unread := [name for name in wanted.values if name != verdict]:
        raise UserError(
            f"prepare.values has no effect: {file} is read as {shape}, which has no {unread[0]}. Remove it."
        )
    if verdict in wanted.values:
        votes: Mapping[str, str] = {vote_key(value): meaning for value, meaning in wanted.values[verdict].items()}
    elif shape == "unpaired":
        votes = _labels(rows, columns, file)
    else:
        votes = _votes(rows, columns, file) if shape == "votes" else PANDALM
    return RowLayout(shape, columns, votes)


def _is_answer(value: Any) -> bool:
    """Whether the value is an answer alone, not a transcript, which has its prompt."""
    return isinstance(value, str) and "\n\nHuman:" not in value


def decode(rows: Iterable[RawRow], layout: RowLayout) -> list[Preference]:
    """The valid preferences of these rows."""
    pairs = (pair for row in rows for pair in to_preferences(row, layout))
    return [pair for pair in pairs if isinstance(pair, Preference) and check_pair(pair, sys.maxsize) is None]


def better_shape(rows: Sequence[RawRow], layout: RowLayout) -> str | None:
    """Another shape that reads nine of ten of these rows, where this one reads fewer than half."""
    sample = rows[:SAMPLE]

    def readable(shape: str) -> float:
        tried = RowLayout(shape, layout.columns, layout.votes)
        return sum(bool(decode([row], tried)) for row in sample) / len(sample)

    if readable(layout.shape) >= 0.5:
        return None
    return next((shape for shape in SHAPES if shape not in (layout.shape, "unpaired") and readable(shape) >= 0.9), None)


def _votes(rows: Sequence[RawRow], columns: Mapping[str, str], file: str) -> Mapping[str, str]:
    """What each vote means: evident from the values, or that of PandaLM's own columns."""
    column = columns.get("winner", columns.get("annotator1", "winner"))
    values = count_values(rows, column)
    if "score1" in columns or not values:
        return PANDALM
    first, second = (columns.get(side, side) for side in ("response1", "response2"))
    if evident := evident_votes(values, first, second):
        return evident
    raise UserError(
        f"{file}: `{column}` holds {_times(values)} in the first {len(rows)} rows, and which answer each value prefers "
        f"is not evident. Look it up, and set {_values_setting(values)}: first is `{first}`, second is `{second}`."
    )


def _labels(rows: Sequence[RawRow], columns: Mapping[str, str], file: str) -> Mapping[str, str]:
    """What each label of an unpaired row means, if that is evident."""
    column = columns.get("label", "label")
    values = count_values(rows, column)
    if sum(count for value, count in values.items() if value not in LABELS) <= UNKNOWN * values.total():
        return LABELS  # rows with another value are rejected one by one
    raise UserError(
        f"{file}: `{column}` holds {_times(values)} in the first {len(rows)} rows, and which of them mark a desirable "
        f"answer is not evident. Set {_values_setting(values, 'label', 'desirable|undesirable')}."
    )


def _times(values: Counter[str]) -> str:
    return ", ".join(f"{value} ({count} times)" for value, count in values.most_common())


def _values_setting(values: Iterable[str], column: str = "winner", choices: str = "first|second|tie") -> str:
    return f"prepare.values to {{{column}: {{{', '.join(f'{value}: {choices}' for value in sorted(values))}}}}}"


def _unknown(rows: Sequence[RawRow], example: RawRow, file: str) -> UserError:
    """The rows have no known shape: the error suggests columns by their names."""
    columns = {ours: theirs for ours, theirs in _suggest(rows, example).items() if ours != theirs}
    advice = "Map the columns in prepare.columns, for example {prompt: question, chosen: good, rejected: bad}"
    if columns:
        advice = f"Set prepare.columns to {{{', '.join(f'{ours}: {theirs}' for ours, theirs in columns.items())}}}"
    values = count_values(rows, columns["winner"]) if "winner" in columns else {}
    if values and not evident_votes(values, "1", "2"):
        advice += f" and {_values_setting(values)}, where first is the first of the two answers"
    return UserError(
        f"{file} has the columns {', '.join(map(str, example))}, which match no known row shape "
        f"({', '.join(SHAPES)}; see docs/data.md). {advice}."
    )


def _suggest(rows: Sequence[RawRow], example: RawRow) -> dict[str, str]:
    """Our names of columns that look like those of a row shape; {} if they do not make one."""
    objects = {name: value for name, value in example.items() if isinstance(value, dict)}
    values = example | {f"{name}.{key}": inner for name, value in objects.items() for key, inner in value.items()}
    columns: dict[str, str] = {}
    for ours, words in HINTS.items():
        kind = list if ours == "completions" else str | list
        names = (name for name, value in values.items() if isinstance(value, kind) and name not in columns.values())
        if name := next((name for name in names if words.search(name.rpartition(".")[2].lower())), None):
            columns[ours] = name
    if {"chosen", "rejected"} <= columns.keys():
        return {ours: columns[ours] for ours in ("prompt", "chosen", "rejected") if ours in columns}
    if "prompt" not in columns:
        return {}
    prompt = {"prompt": columns["prompt"]}
    if compared := vote_columns(rows, example).keys() - {"prompt"}:
        return prompt if len(compared) > 2 else {}
    if "completions" in columns and (winner := winner_column(rows, example)):
        return prompt | {"completions": columns["completions"], "winner": winner}
    return {}
