"""What a conversation holds that its text must hold too: every field with content is found again, or named.

A chat template may write a text as it is or escaped, and may trim it. `lost_field` looks for the fields in the order
of the turns. It finds a short text anywhere behind the previous one, so tasks.prepare.frames asks it with marked texts
as well: those are found only if the template reads the field.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tasks.prepare.rows.messages import Message

PLAIN_KEYS = {"role", "content"}
NAMES = ("name", "description", "title")  # of a tool, of its parameters: what tells a model how to call it


def lost_field(text: str, turns: Sequence[Message], first: int = 1) -> str | None:
    """The first field of these turns that the text does not hold; None if it holds all. `first` is a turn's number.

    A leading system turn may be anywhere: Mistral's templates write it into the last user turn.
    """
    start = 0
    for number, turn in enumerate(turns, first):
        content = turn["content"].strip()
        at = text.find(content, start)
        if at < 0:
            at, content = _find(text, content, start)
        if at < 0:
            return f"the content of turn {number} ({turn['role']})"
        end = at + len(content)
        if turn.keys() != PLAIN_KEYS:
            for field, leaves in _further(turns, number - first):
                found = [_find(text, leaf, start) for leaf in leaves]
                if any(position < 0 for position, _ in found):
                    return f"`{field}` of turn {number} ({turn['role']})"
                end = max([end, *(position + len(form) for position, form in found)])
        start = end if number > 1 or turn["role"] != "system" else 0
    return None


def lost_tool(text: str, tools: Sequence[Any]) -> str | None:
    """The first tool whose name, description or parameters are not in the text. Templates may sort them."""
    for number, tool in enumerate(tools, 1):
        for leaf in _tool_leaves(tool):
            if _find(text, leaf, 0)[0] < 0:
                return f"`tools` (tool {number})"
    return None


def _further(turns: Sequence[Message], index: int) -> Iterator[tuple[str, Iterable[str]]]:
    """The fields of a turn besides its content, each with the texts in it."""
    turn = turns[index]
    if reasoning := turn.get("reasoning_content"):
        yield "reasoning_content", [reasoning.strip()]
    for number, call in enumerate(turn.get("tool_calls", ())):
        function = call_function(call)
        yield f"tool_calls[{number}]", [str(function.get("name", "")), *_leaves(parsed_arguments(function))]
    if turn["role"] == "tool":
        yield from _links(turns, index)
    elif "name" in turn:
        yield "name", [str(turn["name"])]


def _links(turns: Sequence[Message], index: int) -> Iterator[tuple[str, Iterable[str]]]:
    """What says to which call a tool's result belongs, unless the order of the results says it."""
    turn = turns[index]
    first = next((n for n in range(index, -1, -1) if turns[n]["role"] != "tool"), -1)
    calls = turns[first].get("tool_calls", ()) if first >= 0 else ()
    names = [str(call_function(call).get("name", "")) for call in calls]
    ids = [call.get("id") for call in calls]
    if turn.get("tool_call_id") in ids and ids.index(turn["tool_call_id"]) != index - first - 1:
        yield "tool_call_id", [str(turn["tool_call_id"])]
    if "name" in turn and turn["name"] not in names:
        yield "name", [str(turn["name"])]


def call_function(call: Any) -> Mapping[str, Any]:
    """Name and arguments of a tool call: OpenAI nests them in `function`."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


def parsed_arguments(function: Mapping[str, Any]) -> Any:
    """The arguments of a call as an object; OpenAI writes them as JSON text."""
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _leaves(value: Any) -> Iterator[str]:
    """All keys and values of nested objects and lists, without what is empty."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value.strip()
    elif value is not None:
        yield json.dumps(value, default=str)


def _tool_leaves(value: Any) -> Iterator[str]:
    """Names, descriptions, parameters and their choices; not the words of JSON Schema, which templates translate."""
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        if key in NAMES and isinstance(inner, str):
            yield inner.strip()
        elif key == "properties" and isinstance(inner, Mapping):
            yield from map(str, inner)
            for parameter in inner.values():
                yield from _tool_leaves(parameter)
        elif key == "enum":
            yield from _leaves(inner)
        else:
            yield from _tool_leaves(inner)


def _find(text: str, leaf: str, start: int) -> tuple[int, str]:
    """Where the leaf is, as it is or escaped, and how it is written there; -1 if it is not in the text."""
    for form in _forms(leaf):
        if (at := text.find(form, start)) >= 0:
            return at, form
    return -1, leaf


def _forms(leaf: str) -> Iterator[str]:
    yield leaf
    yield json.dumps(leaf, ensure_ascii=False)[1:-1]
    yield json.dumps(leaf)[1:-1]
    yield leaf.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    if leaf in ("true", "false"):
        yield leaf.capitalize()  # Python's own words
