"""Hashes that name a pair and a prompt: the same on every machine, and moved by nothing but their content."""

import hashlib
import json
from typing import Any

from tasks.dataset.conversations import Conversation
from tasks.dataset.messages import Message

SPACE = 1 << 64


def identity_of(one: Conversation) -> str:
    """The pair's id: 16 hex digits of its content."""
    return _digest([one.prompt, _answer(one.chosen), _answer(one.rejected)])


def mirror_of(one: Conversation) -> str:
    """The id of the pair that prefers the other answer."""
    return _digest([one.prompt, _answer(one.rejected), _answer(one.chosen)])


def prompt_hash(text: str) -> int:
    """Of the normalised prompt: upper case and spaces make no other prompt. It decides the side of the split."""
    normalised = " ".join(text.lower().split())
    return int(hashlib.sha256(normalised.encode()).hexdigest()[:16], 16)


def is_held_out(hashed: int, eval_fraction: float) -> bool:
    """A prompt never crosses sides, and new rows move none."""
    return (hashed >> 16) / (1 << 48) < eval_fraction


def key_of(value: Any) -> int:
    """Of a row's own id; 0 is for rows without one."""
    return int(_digest(value), 16) or 1


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _answer(turns: list[Message]) -> Any:
    """One turn of plain text is that text."""
    return turns[0]["content"] if len(turns) == 1 and turns[0].keys() == {"role", "content"} else turns
