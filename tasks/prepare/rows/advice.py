"""Errors for a file whose rows leave a choice: they name the settings that read it.

Names and values are quoted where YAML needs it. Columns are suggested only if rows can be read with them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from tasks.config.names import ROW_FORMATS
from tasks.config.prepare import Layout
from tasks.config.strict import parse_yaml, to_yaml
from tasks.errors import UserError
from tasks.prepare.rows.trees import is_message_of_a_tree
from tasks.prepare.rows.vote_values import is_fraction, number_of, vote_key
from tasks.prepare.rows.votes import Verdict, answer_columns, verdicts, vote_columns, winner_column
from tasks.source.reject_reasons import RawRow

SHOWN = 12  # values of a column in an error
EXAMPLE = {"prompt": "question", "chosen": "good", "rejected": "bad"}
VOTES = "first|second|tie"
LABELS = "desirable|undesirable"
# Words in the names of columns, for suggestions; the rejected answer first, since `dispreferred` has both.
HINTS = {
    "rejected": re.compile(r"reject|dispref|non_?pref|bad|worse|worst|los[et]|negative"),
    "chosen": re.compile(r"chosen|prefer|accept|good|better|best|win|positive"),
    "prompt": re.compile(r"prompt|instruction|question|query|context|history|post|input|full_text"),
    "completions": re.compile(r"completion|response|answer|summar|candidate|generation|output"),
}


class Section(NamedTuple):
    """The part of the configuration that says how the rows of a source are laid out."""

    key: str = "prepare"
    own: str = ""  # the entry to add for this source alone, where `key` is for others, too


class Start(NamedTuple):
    """The rows at the start of a file, `example` with a value of each column, and the layout that is configured."""

    rows: Sequence[RawRow]
    example: RawRow
    file: str
    wanted: Layout
    section: Section

    def setting(self, columns: Mapping[str, str] | None = None, values: Mapping[str, Any] | None = None) -> str:
        """What to set where: these columns, added to the configured ones, and these values."""
        changes: dict[str, Any] = {"columns": self.wanted.columns | dict(columns)} if columns is not None else {}
        changes |= {"values": values} if values else {}
        if not self.section.own:
            return " and ".join(f"{self.section.key}.{name} to {to_yaml(value)}" for name, value in changes.items())
        whole = {name: getattr(self.wanted, name) for name in Layout.model_fields}
        return f"{self.section.own} to {to_yaml(whole | changes)}"

    def held(self, verdict: Verdict) -> str:
        counts = verdict.values.most_common()
        shown = ", ".join(f"{value} ({count} times)" for value, count in counts[:SHOWN])
        more = f" and {len(counts) - SHOWN} other values" if len(counts) > SHOWN else ""
        return f"`{verdict.column}` holds {shown}{more}"


Works = Callable[[Layout], bool]  # whether rows can be read with these settings


def missing_column(start: Start, ours: str, theirs: str) -> UserError:
    """prepare.columns names a column that the file does not have."""
    key, has = start.section.key, ", ".join(map(str, start.example))
    rest = start._replace(wanted=start.wanted.model_copy(update={"columns": {}}))
    others = {name: column for name, column in start.wanted.columns.items() if name != ours}
    return UserError(
        f"{key}.columns maps {ours} to `{theirs}`, but {start.file} has no such column. It has {has}. Name one of "
        f"them, or set {rest.setting(others)}."
    )


def unread_values(start: Start, shape: str, column: str) -> UserError:
    """prepare.values has meanings for a column that rows of this shape do not have."""
    rest = start._replace(wanted=start.wanted.model_copy(update={"values": {}}))
    way = f"Set {rest.setting({})}" if start.section.own else "Remove it"
    return UserError(
        f"{start.section.key}.values has no effect: {start.file} is read as {shape}, which has no {column}. {way}."
    )


def unclear_votes(start: Start, verdict: Verdict, first: str, second: str) -> UserError:
    """Votes whose meaning is not evident; or a column that has none, which somebody named."""
    held = f"{start.file}: {start.held(verdict)} in the first {len(start.rows)} rows"
    sides = f"first is `{first}`, second is `{second}`"
    if not any(map(is_fraction, verdict.values)):
        setting = start.setting(values=_choices("winner", verdict.values, VOTES))
        return UserError(
            f"{held}, and which answer each value prefers is not evident. Look it up, and set {setting}: {sides}."
        )
    numbers = [number for value in verdict.values if (number := number_of(value)) is not None]
    ends = [str(math.floor(min(numbers))), str(math.ceil(max(numbers)))]
    others = [other for other in verdicts(start.rows, start.example, first, second) if other.column != verdict.column]
    instead = "".join(f"Set {start.setting({'winner': other.column})} if `{other.column}` does. " for other in others)
    scale = start.setting(values=_choices("winner", ends, "first|second"))
    return UserError(
        f"{held}: fractions, which do not say who wins. {instead}If it is a scale that goes from one answer to the "
        f"other, set {scale}: {sides}."
    )


def unclear_labels(start: Start, verdict: Verdict) -> UserError:
    setting = start.setting(values=_choices("label", verdict.values, LABELS))
    return UserError(
        f"{start.file}: {start.held(verdict)} in the first {len(start.rows)} rows, and which of them mark a desirable "
        f"answer is not evident. Set {setting}."
    )


def unknown_shape(start: Start, works: Works) -> UserError:
    """The rows have no known shape: the error suggests columns by their names."""
    if is_message_of_a_tree(start.example):
        return UserError(
            f"{start.file} has one message in each row (`message_id`, `parent_id`), and prepare reads each row alone, "
            "without the other answers to the same message. Use the file with a whole tree in each row (of "
            "OpenAssistant the one that ends in .trees.jsonl.gz), or write a row {prompt: the turns so far, "
            "completions: the answers, best first} for each message with ranked answers."
        )
    columns = ", ".join(map(str, start.example))
    return UserError(
        f"{start.file} has the columns {columns}, which match no known row shape ({', '.join(ROW_FORMATS)}; see "
        f"docs/data.md). {_undecided(start, works) or _suggestion(start, works)}"
    )


def _undecided(start: Start, works: Works) -> str:
    """Advice for two answers where no column, or more than one, may say which is better; empty for other rows."""
    answers, found = answer_columns(start.example), vote_columns(start.rows, start.example)
    if not answers or found.keys() & {"winner", "score1"}:
        return ""
    first, second = answers[0][0], answers[1]
    named = {"prompt": found["prompt"]} if "prompt" in found else _hinted(start.example, "prompt")
    fixed = {"chosen": first, "rejected": second}
    prompts: list[dict[str, str]] = [{}, named]
    prompt = next((columns for columns in prompts if works(_with(start.wanted, columns | fixed))), None)
    if prompt is None:
        return ""
    candidates = verdicts(start.rows, start.example, first, second)
    if not candidates:
        other = start.setting(prompt | {"chosen": second, "rejected": first})
        return (
            f"No column says which of `{first}` and `{second}` is better. Add a column `winner` with A, B or tie; or, "
            f"if every `{first}` is better than its `{second}`, set {start.setting(prompt | fixed)}; if every "
            f"`{second}` is, set {other}."
        )
    held = "; ".join(map(start.held, candidates))
    ways = ", or ".join(start.setting(prompt | {"winner": verdict.column}) for verdict in candidates)
    return (
        f"More than one column may say which of `{first}` and `{second}` is better: {held}. Look it up, and set {ways}."
    )


def _suggestion(start: Start, works: Works) -> str:
    """The first suggestion of columns with which rows can be read."""
    for columns, values in _suggestions(start):
        meanings = {value: ("first", "second")[n % 2] for n, value in enumerate(values)}
        if works(_with(start.wanted, columns, {"winner": meanings} if values else {})):
            setting = start.setting(columns, _choices("winner", values, VOTES) if values else None)
            return f"Set {setting}{', where first is the first of the two answers' if values else ''}."
    return f"Map the columns, for example: set {start.setting(EXAMPLE)}."


def _suggestions(start: Start) -> Iterable[tuple[dict[str, str], Iterable[str]]]:
    """Our names of columns that look like those of a row shape, with the votes whose meaning is not evident."""
    named = _hinted(start.example, *HINTS)
    prompt = {ours: named[ours] for ours in ("prompt",) if ours in named}
    if {"chosen", "rejected"} <= named.keys():
        yield prompt | {ours: named[ours] for ours in ("chosen", "rejected")}, ()
    answers = answer_columns(start.example)
    sides = (answers[0][0], answers[1]) if answers else ("1", "2")
    found = verdicts(start.rows, start.example, *sides)
    column = vote_columns(start.rows, start.example).get("winner") if answers else winner_column(found)
    winner = next((verdict for verdict in found if verdict.column == column), None)
    unclear = winner.values if winner and not winner.meaning else ()
    if answers or "completions" not in named:
        yield prompt, unclear if answers else ()
    elif prompt and winner:
        yield prompt | {"completions": named["completions"], "winner": winner.column}, unclear


def _hinted(example: RawRow, *names: str) -> dict[str, str]:
    """The columns whose names hint at ours; `info.post` is the field `post` of the object in the column `info`."""
    objects = {name: value for name, value in example.items() if isinstance(value, dict)}
    values = example | {f"{name}.{key}": inner for name, value in objects.items() for key, inner in value.items()}
    columns: dict[str, str] = {}
    for ours in names:
        kind = list if ours == "completions" else str | list
        free = (name for name, value in values.items() if isinstance(value, kind) and name not in columns.values())
        if name := next((name for name in free if HINTS[ours].search(str(name).rpartition(".")[2].lower())), None):
            columns[ours] = name
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def _with(wanted: Layout, columns: Mapping[str, str], values: Mapping[str, Mapping[str, str]] | None = None) -> Layout:
    return wanted.model_copy(update={"columns": wanted.columns | dict(columns), "values": values or wanted.values})


def _choices(column: str, values: Iterable[str], meanings: str) -> dict[str, dict[Any, str]]:
    """prepare.values with the possible meanings of each value; numbers are written without quotes."""
    return {column: {_as_yaml_reads(value): meanings for value in sorted(values)}}


def _as_yaml_reads(value: str) -> Any:
    try:
        read = parse_yaml(value)
    except (yaml.YAMLError, ValueError):
        return value
    return read if isinstance(read, str | int | float) and vote_key(read) == vote_key(value) else value
