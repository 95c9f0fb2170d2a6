"""A row as a preference between two continuations of one conversation, and how answers become such pairs."""

import math
from dataclasses import dataclass
from typing import Any

from tasks.dataset.messages import Message, to_messages
from tasks.dataset.violations import BadRow

Row = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    label: float = 1.0  # how likely it is that chosen is the better one
    margin: float = 0.0  # by how much, where there are scores
    weight: float = 1.0
    tools: list[Any] | None = None


Pairing = Conversation | BadRow


@dataclass(frozen=True)
class Choices:
    """How answers become pairs."""

    expand: str = "best_rest"
    min_margin: float = 0.0
    ties: str = "drop"


def asked(row: Row) -> list[Message]:
    """What the user says: a prompt, or an instruction with its input."""
    if "instruction" not in row:
        return to_messages(row["prompt"], "prompt", "user")
    content = text(row["instruction"], "instruction")
    extra = text(row["input"], "input").strip() if row.get("input") is not None else ""
    return [{"role": "user", "content": f"{content}\n\n{extra}" if extra else content}]


def text(value: Any, column: str) -> str:
    if value is None:
        raise BadRow("missing_field", repr(column))
    if not isinstance(value, str):
        raise BadRow("not_text", column)
    return value


def number(value: Any, column: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadRow("bad_number", f"{column} is {value!r}") from None
    if not math.isfinite(found):
        raise BadRow("bad_number", f"{column} is {value!r}")
    return found
