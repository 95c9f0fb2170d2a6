"""Reasoning of an assistant turn: in a field of its own, or in its content between <think> and </think>."""

import re
from collections.abc import Sequence

from tasks.dataset.rows.messages import REASONING, Message

FIELD = REASONING[0]
VERBATIM = "verbatim"  # of a turn whose reasoning was in its content: the content as the row has it
CLOSE = "</think>"
THOUGHT = re.compile(r"\A\s*(?:<think>)?((?:(?!<think>).)*?)</think>(.*)\Z", re.DOTALL)


def separate(turns: Sequence[Message]) -> list[Message]:
    """The turns with reasoning in its field, wherever the row has it."""
    return [_separate(turn) if CLOSE in turn["content"] and turn["role"] == "assistant" else turn for turn in turns]


def _separate(turn: Message) -> Message:
    found = THOUGHT.match(turn["content"]) if FIELD not in turn else None
    if not found:
        return turn
    reasoning, rest = found.groups()
    parts = {FIELD: reasoning.strip("\n")} if reasoning.strip() else {}
    return {**turn, "content": rest.lstrip("\n"), **parts, VERBATIM: turn["content"]}


def stripped(turn: Message) -> Message:
    return {name: value for name, value in turn.items() if name not in (FIELD, VERBATIM)}


def inline(turn: Message) -> Message:
    """The turn with its reasoning in its content."""
    if FIELD not in turn and VERBATIM not in turn:
        return turn
    content = turn.get(VERBATIM) or f"<think>\n{turn[FIELD]}\n</think>\n\n{turn['content']}"
    return {**stripped(turn), "content": content}
