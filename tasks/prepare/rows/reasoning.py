"""Reasoning of an assistant turn: in a field of its own, or in its content between <think> and </think>."""

import re
from collections.abc import Sequence

from tasks.prepare.rows.messages import REASONING, Message

FIELD = REASONING[0]
VERBATIM = "verbatim"  # of a turn whose reasoning was in its content: the content as the row has it
CLOSE = "</think>"
THOUGHT = re.compile(r"\A\s*<think>((?:(?!<think>).)*?)</think>(.*)\Z", re.DOTALL)
OPENED = re.compile(r"\A\s*((?:(?!<think>).)*?)</think>(.*)\Z", re.DOTALL)  # where the prompt opens the thought
LINE = re.compile(r"\A\s*((?:(?!<think>).)*?)^[ \t]*</think>[ \t\r]*$(.*)\Z", re.DOTALL | re.MULTILINE)


def separate(turns: Sequence[Message], opened: bool = False) -> list[Message]:
    """The turns with reasoning in its field, wherever the row has it. `opened`: each prompt opens a thought.

    Otherwise </think> alone ends a thought only on a line of its own: a text may mention it.
    """
    return [
        _separate(turn, opened) if CLOSE in turn["content"] and turn["role"] == "assistant" else turn for turn in turns
    ]


def _separate(turn: Message, opened: bool) -> Message:
    content = turn["content"]
    found = THOUGHT.match(content) or (OPENED if opened else LINE).match(content)
    if not found or FIELD in turn:
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
