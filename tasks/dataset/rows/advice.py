"""Errors for a file whose rows leave a choice: they name the settings that read it.

Names and values are quoted where YAML needs it. Columns are suggested only if rows can be read with them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import yaml

from tasks.config.names import ROW_FORMATS
from tasks.config.params import Layout
from tasks.config.strict import parse_yaml, to_yaml
from tasks.dataset.rows.reject_reasons import RawRow
from tasks.dataset.rows.trees import is_message_of_a_tree
from tasks.dataset.rows.vote_values import is_fraction, number_of, vote_key
from tasks.dataset.rows.votes import Verdict, answer_columns, verdicts, vote_columns, winner_column
from tasks.errors import UserError

SHOWN = 12  # values of a column in an error
VOTES = "first|second|tie"
LABELS = "desirable|undesirable"
# Words in the names of columns, for suggestions; the rejected answer first, since `dispreferred` has both.
HINTS = {
    "rejected": re.compile(r"reject|dispref|non_?pref|bad|worse|worst|los[et]|negative"),
    "chosen": re.compile(r"chosen|prefer|accept|good|better|best|win|positive"),
    "prompt": re.compile(r"prompt|instruction|question|query|context|history|post|input|full_text"),
    "completions": re.compile(r"completion|response|answer|summar|candidate|generation|output"),
}


class Start(NamedTuple):
    """The rows at the start of a file, `example` with a value of each column, and the layout that `key` configures."""

    rows: Sequence[RawRow]
    example: RawRow
    file: str
    wanted: Layout
    key: str = "prepare"

    def columns(self, columns: Mapping[str, str]) -> str:
        """What to write to add these columns to those that are configured."""
        pairs = (self.wanted.columns | dict(columns)).items()
        return f"{self.key}.columns to {_mapping((ours, _quoted(theirs, lambda name: name)) for ours, theirs in pairs)}"

    def values(self, column: str, values: Iterable[str], meanings: str) -> str:
        pairs = ((_quoted(value, vote_key), meanings) for value in sorted(values))
        return f"{self.key}.values to {{{column}: {_mapping(pairs)}}}"

    def held(self, verdict: Verdict) -> str:
        counts = verdict.values.most_common()
        shown = ", ".join(f"{value} ({count} times)" for value, count in counts[:SHOWN])
        more = f" and {len(counts) - SHOWN} other values" if len(counts) > SHOWN else ""
        return f"`{verdict.column}` holds {shown}{more}"


Works = Callable[[Layout], bool]  # whether rows can be read with these settings


def unclear_votes(start: Start, verdict: Verdict, first: str, second: str) -> UserError:
    """Votes whose meaning is not evident; or a column that has none, which somebody named."""
    held = f"{start.file}: {start.held(verdict)} in the first {len(start.rows)} rows"
    sides = f"first is `{first}`, second is `{second}`"
    if not any(map(is_fraction, verdict.values)):
        setting = start.values("winner", verdict.values, VOTES)
        return UserError(
            f"{held}, and which answer each value prefers is not evident. Look it up, and set {setting}: {sides}."
        )
    numbers = [number for value in verdict.values if (number := number_of(value)) is not None]
    ends = [str(math.floor(min(numbers))), str(math.ceil(max(numbers)))]
    others = [other for other in verdicts(start.rows, start.example, first, second) if other.column != verdict.column]
    instead = "".join(f"Set {start.columns({'winner': other.column})} if `{other.column}` does. " for other in others)
    return UserError(
        f"{held}: fractions, which do not say who wins. {instead}If it is a scale that goes from one answer to the "
        f"other, set {start.values('winner', ends, 'first|second')}: {sides}."
    )


def unclear_labels(start: Start, verdict: Verdict) -> UserError:
    setting = start.values("label", verdict.values, LABELS)
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
    prompt = next((columns for columns in ({}, named) if works(_with(start.wanted, columns | fixed))), None)
    if prompt is None:
        return ""
    candidates = verdicts(start.rows, start.example, first, second)
    if not candidates:
        other = start.columns(prompt | {"chosen": second, "rejected": first})
        return (
            f"No column says which of `{first}` and `{second}` is better. Add a column `winner` with A, B or tie; or, "
            f"if every `{first}` is better than its `{second}`, set {start.columns(prompt | fixed)}; if every "
            f"`{second}` is, set {other}."
        )
    held = "; ".join(map(start.held, candidates))
    ways = ", or ".join(start.columns(prompt | {"winner": verdict.column}) for verdict in candidates)
    return (
        f"More than one column may say which of `{first}` and `{second}` is better: {held}. Look it up, and set {ways}."
    )


def _suggestion(start: Start, works: Works) -> str:
    """The first suggestion of columns with which rows can be read."""
    for columns, values in _suggestions(start):
        meanings = {value: ("first", "second")[n % 2] for n, value in enumerate(values)}
        if works(_with(start.wanted, columns, {"winner": meanings} if values else {})):
            more = f" and {start.values('winner', values, VOTES)}, where first is the first of the two answers"
            return f"Set {start.columns(columns)}{more if values else ''}."
    return f"Map the columns in {start.key}.columns, for example {{prompt: question, chosen: good, rejected: bad}}."


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


def _mapping(pairs: Iterable[tuple[str, str]]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}"


def _quoted(text: str, key: Callable[[object], object]) -> str:
    """The text as a key or value of a YAML mapping, with quotes only where it would be read as something else."""
    try:
        ((read, value),) = parse_yaml(f"{{{text}: {text}}}").items()
    except (yaml.YAMLError, ValueError, AttributeError):
        return to_yaml(text)
    is_plain = isinstance(read, str | int | float) and key(read) == key(value) == key(text)
    return text if is_plain else to_yaml(text)
