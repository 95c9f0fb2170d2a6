"""Preference data as it comes: files of rows, and the row shapes that we know.

A row becomes a Conversation: the messages of the prompt and one answer each. New shapes are entries of SHAPES.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import UserError

Message = dict[str, str]
Row = dict[str, Any]


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason it is counted under."""


@dataclass(frozen=True)
class Conversation:
    prompt: list[Message]
    chosen: str
    rejected: str


def read_rows(path: Path, name: str) -> Iterator[tuple[int, Row]]:
    """(line or row number from 1, row). `name` is what the user calls the file."""
    return READERS[path.suffix](path, name)


def _read_jsonl(path: Path, name: str) -> Iterator[tuple[int, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
                raise UserError(
                    f"{name}, line {number}: not valid JSON ({reason}): {line[:80].decode(errors='replace')!r}. "
                    "Mend or delete the line."
                ) from None
            yield number, _mapping(row, name, number)


def _read_json(path: Path, name: str) -> Iterator[tuple[int, Row]]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{name}: not valid JSON ({error}). One object per line belongs in a .jsonl file.") from None
    if not isinstance(rows, list):
        raise UserError(f"{name}: a .json file must hold a list of rows, and it holds {type(rows).__name__}.")
    return ((number, _mapping(row, name, number)) for number, row in enumerate(rows, start=1))


def _read_csv(path: Path, name: str) -> Iterator[tuple[int, Row]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from enumerate(csv.DictReader(file), start=1)


def _read_parquet(path: Path, name: str) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{name}: not a Parquet file ({error}).") from None
    return enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


READERS: dict[str, Callable[[Path, str], Iterator[tuple[int, Row]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def detect(row: Row) -> str:
    """Which of our shapes a row has, by its columns."""
    for name, (needs, _) in SHAPES.items():
        if needs <= row.keys():
            return name
    needed = "; ".join(f"{name}: {', '.join(sorted(needs))}" for name, (needs, _) in SHAPES.items())
    raise UserError(
        f"The rows have the columns {', '.join(map(str, row))}, which is no shape that we know ({needed}). "
        "Name the columns in prepare.columns, for example {prompt: question, chosen: good, rejected: bad}."
    )


def rename(row: Row, columns: Mapping[Any, str]) -> Row:
    """Columns under our names."""
    theirs = set(columns.values())
    kept = {name: value for name, value in row.items() if name not in theirs}
    return {**kept, **{ours: row[name] for ours, name in columns.items() if name in row}}


def to_conversation(row: Row, shape: str) -> Conversation:
    """The row as a conversation, or BadRow with the reason."""
    conversation = SHAPES[shape][1](row)
    if not conversation.prompt or conversation.prompt[-1]["role"] not in ("user", "tool"):
        raise BadRow("the prompt does not end with a user's turn")
    if not any(message["content"].strip() for message in conversation.prompt if message["role"] == "user"):
        raise BadRow("the prompt is empty")
    if not conversation.chosen.strip() or not conversation.rejected.strip():
        raise BadRow("an answer is empty")
    if conversation.chosen == conversation.rejected:
        raise BadRow("chosen and rejected are the same")
    return conversation


def _pairs(row: Row) -> Conversation:
    """prompt, chosen, rejected: text, or lists of messages (a response may repeat the prompt's messages)."""
    prompt = _messages(row["prompt"], "prompt", role="user")
    return Conversation(prompt, _answer(row["chosen"], prompt, "chosen"), _answer(row["rejected"], prompt, "rejected"))


def _instruction(row: Row) -> Conversation:
    """instruction, input (may be empty), chosen, rejected."""
    text = _text(row["instruction"], "instruction")
    extra = _text(row["input"], "input").strip() if row.get("input") is not None else ""
    content = f"{text}\n\n{extra}" if extra else text
    return Conversation(
        [{"role": "user", "content": content}], _text(row["chosen"], "chosen"), _text(row["rejected"], "rejected")
    )


def _transcript(row: Row) -> Conversation:
    """Anthropic's HH: both conversations whole, as text or as messages; they share all but the last answer."""
    chosen, rejected = _turns(row["chosen"], "chosen"), _turns(row["rejected"], "rejected")
    if chosen[:-1] != rejected[:-1]:
        raise BadRow("the two transcripts part before the last answer")
    if chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
        raise BadRow("a transcript does not end with the assistant")
    return Conversation(chosen[:-1], chosen[-1]["content"], rejected[-1]["content"])


SHAPES: dict[str, tuple[set[str], Callable[[Row], Conversation]]] = {
    "pairs": ({"prompt", "chosen", "rejected"}, _pairs),
    "instruction": ({"instruction", "chosen", "rejected"}, _instruction),
    "transcript": ({"chosen", "rejected"}, _transcript),
}

_TURN = re.compile(r"\n\n(Human|Assistant):")


def _turns(value: Any, column: str) -> list[Message]:
    if isinstance(value, list):
        return _messages(value, column, role="assistant")
    start, *parts = _TURN.split(_text(value, column))
    if start.strip() or not parts:
        raise BadRow(f"{column} is not a transcript that starts with '\\n\\nHuman:'")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": text.strip()} for who, text in zip(parts[0::2], parts[1::2], strict=True)]


def _messages(value: Any, column: str, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRow(f"{column} is neither text nor a list of messages")
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise BadRow(f"a message of {column} lacks role or content")
        _text(message["content"], column)
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _answer(value: Any, prompt: list[Message], column: str) -> str:
    messages = _messages(value, column, role="assistant")
    own = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    if len(own) != 1 or own[0]["role"] != "assistant":
        raise BadRow(f"{column} is not one assistant message after the prompt")
    return own[0]["content"]


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{column} is not text" if value is not None else f"{column} is missing")
    return value


def _mapping(row: Any, name: str, number: int) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{name}, row {number}: must be an object with named columns, and it is {type(row).__name__}.")
    return row
