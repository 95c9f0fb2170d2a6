"""How the rows of a file are laid out: row shape, columns, and which answer each vote prefers.

`find_layout` decides it from the first rows of a file, and `decode` gives the preferences that they become: a person
who sees three of them sees a reversed label before anything is trained. Where the rows leave a choice, the UserError
names the settings to write.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tasks.config.params import Layout
from tasks.dataset.rows.contract import check_pairs
from tasks.dataset.rows.messages import to_text
from tasks.dataset.rows.preference import LABELS, PANDALM, PairingOptions, Preference
from tasks.dataset.rows.rankings import vote_key
from tasks.dataset.rows.reject_reasons import RawRow
from tasks.dataset.rows.row_shapes import SHAPES, detect_shape, has_column, rename_columns, to_preferences
from tasks.dataset.rows.votes import count_values, evident_votes, vote_columns, winner_column
from tasks.errors import UserError
from tasks.system.markup import printable

AUTO = Layout(format="auto", columns={})
SAMPLE = 200  # rows to try a shape on
UNKNOWN = 0.1  # share of labels that are not known
WIDTH = 100  # characters of a decoded text
# Words in the names of columns, for suggestions; the rejected answer first, since `dispreferred` has both.
HINTS = {
    "rejected": re.compile(r"reject|dispref|non_?pref|bad|worse|worst|los[et]|negative"),
    "chosen": re.compile(r"chosen|prefer|accept|good|better|best|win|positive"),
    "prompt": re.compile(r"prompt|instruction|question|query|context|history|post|input|full_text"),
    "completions": re.compile(r"completion|response|answer|summar|candidate|generation|output"),
}


@dataclass(frozen=True)
class RowLayout:
    shape: str
    columns: dict[str, str]  # our name: the file's
    votes: Mapping[str, str] = field(default_factory=lambda: PANDALM)  # value: first, second or tie; desirable or not


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
    if shape == "transcript" and wanted.format == "auto" and all(map(_is_answer, rows)):
        raise _unknown(rows, example, file)  # two answers, and their prompt is in another column
    if shape == "votes" and not SHAPES["votes"].matches(rename_columns(example, columns)):
        columns = vote_columns(rows, example) | columns
        if not SHAPES["votes"].matches(rename_columns(example, columns)) or _lacks_prompt(example, columns):
            raise _unknown(rows, example, file)
    reads = {"votes": "winner", "unpaired": "label"}.get(shape)
    if unread := [name for name in wanted.values if name != reads]:
        raise UserError(
            f"prepare.values has no effect: {file} is read as {shape}, which has no {unread[0]}. Remove it."
        )
    if shape == "unpaired":
        return RowLayout(shape, columns, _labels(rows, columns, file, wanted))
    votes = _votes(rows, columns, file, wanted) if shape == "votes" else PANDALM
    return RowLayout(shape, columns, votes)


def _is_answer(row: RawRow) -> bool:
    """Whether `chosen` is text, but no transcript."""
    return isinstance(row.get("chosen"), str) and "\n\nHuman:" not in row["chosen"]


def _lacks_prompt(example: RawRow, columns: Mapping[str, str]) -> bool:
    """True for two answers that are neither whole conversations nor have a prompt."""
    row = rename_columns(example, columns)
    answer, asked = row.get("response1"), (row.get("prompt"), row.get("instruction"))
    has_prompt = any(isinstance(value, str | list) for value in asked)
    return not has_prompt and isinstance(answer, str) and "\n\nHuman:" not in answer


def decode(rows: Iterable[RawRow], layout: RowLayout, options: PairingOptions | None = None) -> list[Preference]:
    """The valid preferences of these rows."""
    options = options or PairingOptions(votes=layout.votes)
    renamed = (rename_columns(row, layout.columns) for row in rows)
    made = [one for row in renamed for one in to_preferences(row, layout.shape, layout.columns, options)]
    found = [one for one in made if isinstance(one, Preference)]
    return [one for one, bad in zip(found, check_pairs(found, 1 << 30), strict=True) if bad is None]


def describe(preferences: Iterable[Preference]) -> list[str]:
    """Short lines for each: the prompt's last turn, then + the chosen and - the rejected answer."""
    lines = []
    for one in preferences:
        parts = {"": one.prompt[-1:], "  + ": one.chosen, "  - ": one.rejected}
        if one.sign:
            del parts["  - " if one.sign > 0 else "  + "]
        lines += [sign + _short(to_text(turns)) for sign, turns in parts.items()]
    return lines


def better_shape(rows: Sequence[RawRow], layout: RowLayout) -> str | None:
    """Another shape that reads nine of ten of these rows, where this one reads fewer than half."""
    sample = rows[:SAMPLE]

    def readable(shape: str) -> float:
        return sum(bool(decode([row], RowLayout(shape, layout.columns, layout.votes))) for row in sample) / len(sample)

    if not sample or readable(layout.shape) >= 0.5:
        return None
    return next((shape for shape in SHAPES if shape not in (layout.shape, "unpaired") and readable(shape) >= 0.9), None)


def _votes(rows: Sequence[RawRow], columns: Mapping[str, str], file: str, wanted: Layout) -> Mapping[str, str]:
    """What each vote means: as configured, evident from the values, or that of PandaLM's own columns."""
    if "winner" in wanted.values:
        return {vote_key(value): meaning for value, meaning in wanted.values["winner"].items()}
    column = columns.get("winner", columns.get("annotator1", "winner"))
    values = count_values(rows, column)
    if "score1" in columns or not values:
        return PANDALM
    first, second = (columns.get(side, side) for side in ("response1", "response2"))
    if evident := evident_votes(values, first, second):
        return evident
    found = ", ".join(f"{value} ({count} times)" for value, count in values.most_common())
    raise UserError(
        f"{file}: `{column}` holds {found} in the first {len(rows)} rows, and which answer each value prefers is not "
        f"evident. Look it up, and set {_values_setting(values)}: first is `{first}`, second is `{second}`."
    )


def _labels(rows: Sequence[RawRow], columns: Mapping[str, str], file: str, wanted: Layout) -> Mapping[str, str]:
    """What each label of an unpaired row means: as configured, or evident."""
    if "label" in wanted.values:
        return {vote_key(value): meaning for value, meaning in wanted.values["label"].items()}
    column = columns.get("label", "label")
    values = count_values(rows, column)
    if sum(count for value, count in values.items() if value not in LABELS) <= UNKNOWN * values.total():
        return LABELS  # rows with another value are rejected one by one
    found = ", ".join(f"{value} ({count} times)" for value, count in values.most_common())
    setting = ", ".join(f"{value}: desirable|undesirable" for value in sorted(values))
    raise UserError(
        f"{file}: `{column}` holds {found} in the first {len(rows)} rows, and which of them mark a desirable answer is "
        f"not evident. Set prepare.values to {{label: {{{setting}}}}}."
    )


def _values_setting(values: Iterable[str]) -> str:
    return f"prepare.values to {{winner: {{{', '.join(f'{v}: first|second|tie' for v in sorted(values))}}}}}"


def _unknown(rows: Sequence[RawRow], example: RawRow, file: str) -> UserError:
    """The rows have no known shape: the error suggests columns by their names."""
    found = {ours: theirs for ours, theirs in _suggest(rows, example).items() if ours != theirs}
    columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in found.items())
    advice = (
        f"Set prepare.columns to {{{columns}}}"
        if found
        else ("Map the columns in prepare.columns, for example {prompt: question, chosen: good, rejected: bad}")
    )
    values = count_values(rows, found["winner"]) if "winner" in found else {}
    if values and not evident_votes(values, "1", "2"):
        advice += f" and {_values_setting(values)}, where first is the first of the two answers"
    return UserError(
        f"{file} has the columns {', '.join(map(str, example))}, which match no known row shape "
        f"({', '.join(SHAPES)}; see docs/data.md). {advice}."
    )


def _suggest(rows: Sequence[RawRow], example: RawRow) -> dict[str, str]:
    """Our names of columns that look like those of a row shape; {} if they do not make one."""
    nested = {
        f"{name}.{key}": v for name, value in example.items() if isinstance(value, dict) for key, v in value.items()
    }
    found: dict[str, str] = {}
    for ours, words in HINTS.items():
        kind = list if ours == "completions" else str | list
        names = (
            name for name, v in {**example, **nested}.items() if isinstance(v, kind) and name not in found.values()
        )
        if name := next((name for name in names if words.search(name.rpartition(".")[2].lower())), None):
            found[ours] = name
    if {"chosen", "rejected"} <= found.keys():
        return {ours: found[ours] for ours in ("prompt", "chosen", "rejected") if ours in found}
    if "prompt" not in found:
        return {}
    prompt = {"prompt": found["prompt"]}
    if compared := {name: column for name, column in vote_columns(rows, example).items() if name != "prompt"}:
        return prompt if len(compared) > 2 else {}
    winner = winner_column(rows, example)
    return prompt | {"completions": found["completions"], "winner": winner} if "completions" in found and winner else {}


def _short(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
