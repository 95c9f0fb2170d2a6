"""What a chat template does with conversations of one structure, found out with texts of our own.

It depends on the structure (roles, and which fields the turns have), not on the texts, so that it is found out once per
structure. Marks are found again if and only if the template reads their fields.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from tasks.prepare.rendering import Form, Frame, answer_of, end_of_turn, handed, prompt_text, response_text, text_of
from tasks.prepare.rows import reasoning
from tasks.prepare.rows.contents import call_function
from tasks.prepare.rows.messages import Message
from tasks.prepare.templates import ChatTemplate, encode, render
from tasks.source.reject_reasons import RejectedRow

MARKED_TEXT = re.compile(r"mark\d+(?:text|thought|name|key|value|id)")
OPENED = re.compile(r"<(\w+)>\s*\Z")  # a generation prompt that opens a thought


def frame_of(template: ChatTemplate, context: Sequence[Message], answer: Message, tools: Any) -> Frame:
    """The frame of a conversation with reasoning in its field, of which `answer` is the last turn."""
    key = (*map(_shape, context), _shape(answer), *(_tool_shape(tools[0]) if tools else ()))
    if key not in template.known:
        template.known[key] = _find_frame(template, *_marked([*context, answer]), _marked_tools(tools))
    return template.known[key]


def opens_thought(template: ChatTemplate) -> bool:
    """Whether the generation prompt after a question opens a thought."""
    if "opens_thought" not in template.known:
        question = [{"role": "user", "content": "mark1text"}]
        prompts = (_prompt_of(template, handed(template, form, question)) for form in _forms(question))
        template.known["opens_thought"] = any(OPENED.search(prompt) for prompt in prompts)
    return bool(template.known["opens_thought"])


def _prompt_of(template: ChatTemplate, turns: list[Message]) -> str:
    try:
        return str(render(template, turns, None, generation=True))
    except RejectedRow:
        return ""


def _shape(turn: Message) -> Any:
    """What may change how a template writes a turn, except for its texts."""
    if len(turn) == 2:
        return turn["role"], bool(turn["content"].strip())
    calls = [(bool(call.get("id")), "function" in call) for call in turn.get("tool_calls", ())]
    return turn["role"], bool(turn["content"].strip()), tuple(calls), *sorted(turn.keys() - {"role", "content"})


def _marked(turns: Sequence[Message]) -> tuple[list[Message], Message]:
    """Turns of the same structure with texts of our own."""
    marks: dict[tuple[str, str], str] = {}

    def mark(text: Any, kind: str = "text") -> str:
        return marks.setdefault((str(text), kind), f"mark{len(marks) + 10}{kind}") if str(text).strip() else ""

    made = []
    for number, turn in enumerate(turns):
        marked: Message = {"role": turn["role"], "content": mark(number) if turn["content"].strip() else ""}
        if reasoning.FIELD in turn:
            marked[reasoning.FIELD] = mark(number, "thought")
        if reasoning.VERBATIM in turn:
            marked[reasoning.VERBATIM] = reasoning.inline(marked)["content"]
        if "tool_calls" in turn:
            calls = enumerate(turn["tool_calls"])
            marked["tool_calls"] = [_marked_call(call, f"{number} {index}", mark) for index, call in calls]
        if "tool_call_id" in turn:
            marked["tool_call_id"] = mark(turn["tool_call_id"], "id")
        if "name" in turn:
            marked["name"] = mark(turn["name"], "name")
        made.append(marked)
    return made[:-1], made[-1]


def _tool_shape(tool: Any) -> tuple[bool, ...]:
    function = call_function(tool)
    return function is not tool, *(bool(function.get(name)) for name in ("name", "description", "parameters"))


def _marked_tools(tools: Any) -> list[Any] | None:
    """A tool with the fields of the first one."""
    if not tools:
        return None
    nested, *has = _tool_shape(tools[0])
    parameter = {"mark3key": {"type": "string", "description": "mark4text"}}
    fields = {
        "name": "mark1name",
        "description": "mark2text",
        "parameters": {"type": "object", "properties": parameter, "required": ["mark3key"]},
    }
    function = {name: value for (name, value), there in zip(fields.items(), has, strict=True) if there}
    return [{"type": "function", "function": function} if nested else function]


def _marked_call(call: Any, number: str, mark: Any) -> dict[str, Any]:
    name = mark(call_function(call).get("name", ""), "name")
    function = {"name": name, "arguments": {mark(number, "key"): mark(number, "value")}}
    made = {"type": "function", "function": function} if "function" in call else function
    return made | ({"id": mark(call["id"], "id")} if call.get("id") else {})


def _forms(turns: Sequence[Message]) -> Iterator[Form]:
    calls = any("tool_calls" in turn for turn in turns)
    for parts, none, text in product((False, True), *((False, True) if calls else (False,),) * 2):
        yield Form(parts, text, none)


def _find_frame(template: ChatTemplate, context: list[Message], answer: Message, tools: Any) -> Frame:
    """Of the first form in which nothing is lost, or else of the first one that writes the texts of the turns."""
    frames = []
    for form in _forms([*context, answer]):
        try:
            frame = _try_frame(template, form, context, answer, tools)
        except RejectedRow:
            continue
        if not frame.lost and not frame.rewrites:
            return frame
        frames.append(frame)
    # Where each form is refused, the error for the row itself says why.
    return min(frames, key=lambda frame: frame.lost.startswith("the content"), default=Frame(Form()))


def _try_frame(template: ChatTemplate, form: Form, context: list[Message], answer: Message, tools: Any) -> Frame:
    before = handed(template, form, context)
    prompt = render(template, before, tools, generation=True)
    try:
        prompt_text(prompt, context, tools)
    except RejectedRow as rejected:
        return Frame(form, lost=rejected.detail)
    dropped = any(turn.get(reasoning.FIELD, "") not in prompt for turn in context)
    plain, lost = Frame(form, earlier_dropped=dropped), ""
    frames = [plain]
    if reasoning.FIELD not in answer:
        frames.append(replace(plain, empty_thought=True))
    if opened := OPENED.search(prompt):
        frames.append(replace(plain, opened=opened.group()))
    for frame in frames:
        written = answer_of(frame, answer)
        whole = render(template, [*before, *handed(template, form, [written])], tools)
        try:
            response = response_text(frame, prompt, whole, answer, len(context) + 1)
        except RejectedRow as rejected:
            lost = lost or rejected.detail
            continue
        return _with_end(template, frame, [*context, written], whole, response, tools)
    return Frame(form, lost=lost, rewrites=not lost)


def _with_end(
    template: ChatTemplate, frame: Frame, turns: list[Message], whole: str, response: str, tools: Any
) -> Frame:
    """The frame with the end of the turn: what is to be added, and what is to be removed before."""
    last = list(MARKED_TEXT.finditer(response))[-1]
    tail = response[last.end() :]
    (ids,) = encode(template.tokenizer, [tail])
    stop = next((n + 1 for n, token in enumerate(ids) if token in template.stop_ids), None)
    if stop is not None:
        after = template.tokenizer.decode(ids[stop:])  # some templates write more than white space
        return replace(frame, drop=after) if after.strip() and tail.endswith(after) else frame
    if end_of_turn(template, ids) is not None:
        return frame
    end = _next_opening(template, frame, turns, last.group() + tail, tools) or template.tokenizer.eos_token
    return replace(frame, drop=tail[len(tail.rstrip()) :], end=end)


def _next_opening(template: ChatTemplate, frame: Frame, turns: list[Message], before: str, tools: Any) -> str | None:
    """The token that opens the next turn, if the model stops at it: GLM-4 ends no turn in any other way."""
    role = "tool" if "tool_calls" in turns[-1] else "user"
    text = text_of(template, handed(template, frame.form, [*turns, {"role": role, "content": "mark1text"}]), tools)
    (ids,) = encode(template.tokenizer, [text.partition(before)[2]])
    if not ids or ids[0] not in template.stop_ids:
        return None
    return str(template.tokenizer.convert_ids_to_tokens(ids[0]))
