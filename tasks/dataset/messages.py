"""Turns of a conversation, from the ways that data sets write them to {"role", "content"}."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tasks.dataset.violations import BadRow

Message = dict[str, Any]

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **dict.fromkeys(("gpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython"), "tool"),
    "human": "user",
    "developer": "system",
}
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # what a template may read besides
_TURN = re.compile(r"\n\n(Human|Assistant):")


def to_messages(value: Any, column: str, role: str) -> list[Message]:
    """Text is one turn of that role; a list or one object is turns as they say themselves."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if value is None:
        raise BadRow("missing_field", repr(column))
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        raise BadRow("not_text", column)
    return [_message(turn, column) for turn in turns]


def from_text(value: Any, column: str) -> list[Message]:
    """A whole conversation: messages, or Anthropic's text. A speaker who goes on is one turn."""
    if not isinstance(value, str):
        return to_messages(value, column, "assistant")
    start, *parts = _TURN.split(value)
    if start.strip() or not parts:
        raise BadRow("not_text", f"{column} is no transcript; a prompt in another column goes into prepare.columns")
    turns: list[Message] = []
    for who, text in zip(parts[0::2], parts[1::2], strict=True):
        role, text = ROLES["user" if who == "Human" else "assistant"], text.strip()
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] = f"{turns[-1]['content']}\n\n{text}".strip()
        else:
            turns.append({"role": role, "content": text})
    return turns


def own_turns(value: Any, prompt: list[Message], column: str) -> list[Message]:
    """An answer's turns, without the prompt where the answer repeats it."""
    turns = to_messages(value, column, "assistant")
    if turns[: len(prompt)] == prompt:
        return turns[len(prompt) :]
    asked = [turn for turn in prompt if turn["role"] != "system"]
    repeated = next((n for n in range(len(turns)) if turns[n : n + len(asked)] == asked), None)
    if repeated is not None and all(turn["role"] == "system" for turn in turns[:repeated]):
        return turns[repeated + len(asked) :]  # a system turn stands before one of the two
    return turns


def common_prefix(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many turns two conversations share."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def text_of(turns: Sequence[Message]) -> str:
    """For people and for hashes: a single turn is its content, several say who speaks."""
    if len(turns) == 1 and "tool_calls" not in turns[0]:
        return turns[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}{_calls(turn)}" for turn in turns)


def check_turns(prompt: Sequence[Message], answer: Sequence[Message]) -> None:
    """An order that a conversation has: system first, user and assistant in turn, the assistant last."""
    turns = [*prompt, *answer]
    roles = [turn["role"] for turn in turns]
    if not answer or roles[-1] != "assistant":
        raise BadRow("turn_order", "an answer does not end with the assistant")
    if "system" in roles[1:]:
        raise BadRow("turn_order", "a system turn after the start")
    if "user" not in roles:
        raise BadRow("turn_order", "there is no user's turn")
    for before, after in pairwise(turns):
        if before["role"] == after["role"] and after["role"] in ("user", "assistant") and "tool_calls" not in before:
            raise BadRow("turn_order", f"two turns of the {after['role']} in a row")
    if roles[len(prompt)] == "assistant" and roles[len(prompt) - 1] not in ("user", "tool"):
        raise BadRow("turn_order", "the prompt does not end with a user's turn")


def _message(turn: Any, column: str) -> Message:
    if not isinstance(turn, dict):
        raise BadRow("not_text", f"a message of {column}")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if role is None or (content is None and not turn.get("tool_calls")):
        raise BadRow("missing_field", f"a message of {column} lacks role or content")
    if role not in ROLES:
        raise BadRow("wrong_role", f"{role!r} in {column}")
    if content is not None and not isinstance(content, str):
        content = _parts(content, column)
    more = {name: turn[name] for name in KEPT if turn.get(name)}
    return {"role": ROLES[role], "content": content or "", **more}


def _parts(content: Any, column: str) -> str:
    """OpenAI's list of content parts, where all are text."""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise BadRow("not_text", f"the content of a message of {column}")
    return "".join(part["text"] for part in parts)


def _calls(turn: Message) -> str:
    return f" {turn['tool_calls']}" if "tool_calls" in turn else ""
