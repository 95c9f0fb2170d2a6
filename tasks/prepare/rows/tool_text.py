"""`prepare.tools: text`: tools, calls and results as text of ordinary turns, for a chat template that has no tools.

The words are those of Qwen and Hermes: <tool_call> around a JSON object, which the tool parser `hermes` of vLLM reads.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from tasks.prepare.rows.contents import call_function, parsed_arguments
from tasks.prepare.rows.messages import Message
from tasks.prepare.rows.preference import Preference

HEAD = "You may call these functions. Answer with a JSON object in <tool_call></tool_call> for each call:\n<tools>"
CALL_KEYS = ("tool_calls", "tool_call_id", "name")


def tools_as_text(preference: Preference, system: bool) -> Preference:
    """The preference without tools and tool turns; `system`: the template writes system turns."""
    sides = (preference.prompt, preference.chosen, preference.rejected)
    prompt, chosen, rejected = (_turns(turns) for turns in sides)
    if preference.tools:
        prompt = _with_definitions(prompt, preference.tools, system)
    return replace(preference, prompt=prompt, chosen=chosen, rejected=rejected, tools=None)


def _turns(turns: Sequence[Message]) -> list[Message]:
    made: list[Message] = []
    before: Message = {}  # the turn whose calls have the results
    for is_result, group in groupby(turns, key=lambda turn: turn["role"] == "tool"):
        if is_result:  # several results are one turn, so that roles alternate
            ids = [call.get("id") for call in before.get("tool_calls", ())]
            ordered = sorted(group, key=lambda turn: _position(ids, turn.get("tool_call_id")))
            results = "\n".join(f"<tool_response>\n{_result(turn)}\n</tool_response>" for turn in ordered)
            made.append({"role": "user", "content": results})
        else:
            ordinary = list(group)
            before = ordinary[-1]
            made += [_with_calls(turn) if "tool_calls" in turn else turn for turn in ordinary]
    return made


def _position(ids: list[Any], call: Any) -> int:
    """Results in the order of their calls need no ids."""
    return ids.index(call) if call in ids else len(ids)


def _result(turn: Message) -> str:
    if "name" not in turn:
        return turn["content"]
    return json.dumps({"name": turn["name"], "content": turn["content"]}, ensure_ascii=False)


def _with_calls(turn: Message) -> Message:
    calls = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in turn["tool_calls"]]
    kept = {name: value for name, value in turn.items() if name not in CALL_KEYS}
    return {**kept, "content": "\n".join([*([turn["content"]] if turn["content"] else []), *calls])}


def _call(call: Any) -> str:
    function = call_function(call)
    content = {"name": function.get("name"), "arguments": parsed_arguments(function)}
    return json.dumps(content, ensure_ascii=False, default=str)


def _with_definitions(prompt: list[Message], tools: Sequence[Any], system: bool) -> list[Message]:
    """The tools in the system turn, or before the first question where the template writes no system turn."""
    lines = [json.dumps(tool, ensure_ascii=False, default=str) for tool in tools]
    text = "\n".join([HEAD, *lines, "</tools>"])
    if prompt[0]["role"] == "system":
        return [{**prompt[0], "content": f"{prompt[0]['content']}\n\n{text}".lstrip()}, *prompt[1:]]
    if system:
        return [{"role": "system", "content": text}, *prompt]
    first = next(n for n, turn in enumerate(prompt) if turn["role"] == "user")
    question = {**prompt[first], "content": f"{text}\n\n{prompt[first]['content']}"}
    return [*prompt[:first], question, *prompt[first + 1 :]]
