"""Messages to text and back: how they are handed to a chat template, and what of its text is prompt and response.

The prompt is what the model is given to answer: the text with the generation prompt. The response is what it has to
write then, up to the end of its turn. Most templates write a whole conversation as prompt + response. Others open a
thought in the generation prompt and leave it out of the answer, read content only from parts, or write no end.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks.prepare.rows import reasoning
from tasks.prepare.rows.contents import call_function, lost_field, lost_tool, parsed_arguments
from tasks.prepare.rows.messages import REASONING, Message
from tasks.prepare.templates import ChatTemplate, render
from tasks.source.reject_reasons import RejectedRow

EMPTY = "mark0empty"  # stands for a thought that is empty
OTHER = "Set prepare.template to chatml, plain or the text of a template"
SEVERAL = "several turns of an answer"
MOVES_SYSTEM = "the system prompt is not written at the start, but into the last user turn"
TOOLS_FIX = "Set prepare.tools to text, or prepare.template to the text of a template that writes tools"
REASONING_FIX = (
    "Set prepare.reasoning to strip, or the template's argument for it in prepare.chat_template_kwargs, such as "
    "enable_thinking"
)
FIXES = {  # by reason, and by what the detail names or what the row has
    "template_drops": {
        "`tool": TOOLS_FIX,
        "reasoning": "Set prepare.reasoning to text (<think> in the answer) or to strip",
        "": f"{OTHER} that writes it, or remove it from the rows",
    },
    "template_rewrites": {
        MOVES_SYSTEM: f"{OTHER} that begins a conversation with the system prompt, or remove it from the rows",
        SEVERAL: "Set prepare.loss_on to last, or prepare.reasoning to strip",
        "`tool": TOOLS_FIX,
        "reasoning": REASONING_FIX,
        "": f"{OTHER} that begins a conversation with its prompt",
    },
    "template_refused": {
        "`tool": TOOLS_FIX,
        "reasoning": REASONING_FIX,
        "": f"{OTHER} that accepts such turns",
    },
}


class Form(NamedTuple):
    """How messages are handed to a template."""

    parts: bool = False  # content as a list of parts: templates of models for images read nothing else
    text_arguments: bool = False  # the arguments of a call as JSON text, not as an object
    none: bool = False  # no content as None, not as an empty text


@dataclass(frozen=True)
class Frame:
    """What surrounds the contents of conversations of one structure."""

    form: Form
    lost: str = ""  # the first field that the template does not write
    rewrites: bool = False  # the whole conversation does not begin with the prompt
    empty_thought: bool = False  # the answer is written with a thought that is then emptied
    opened: str = ""  # end of the prompt that the template leaves out of the answer: it opens a thought
    earlier_dropped: bool = False  # reasoning of earlier turns is left out
    drop: str = ""  # what the template writes after the answer, where `end` takes its place
    end: str = ""  # the end token, where the template writes none

    @property
    def remarkable(self) -> bool:
        return bool(self.end or self.opened or self.empty_thought or self.earlier_dropped)


def check_frames(*frames: Frame) -> None:
    """RejectedRow if the template drops a field or rewrites the prompt, whatever the texts are."""
    for frame in frames:
        if frame.lost:
            raise RejectedRow("template_drops", frame.lost)
        if frame.rewrites:
            raise RejectedRow("template_rewrites")


def handed(template: ChatTemplate, form: Form, turns: Sequence[Message]) -> list[Message]:
    """The messages as the template reads them."""
    if form == Form() and all(len(turn) == 2 for turn in turns):
        return list(turns)
    return [_handed(template, form, turn) for turn in turns]


def prompt_text(prompt: str, context: Sequence[Message], tools: Any) -> str:
    """The prompt, if it holds all contents but the reasoning of earlier turns."""
    turns = [turn if len(turn) == 2 else reasoning.stripped(turn) for turn in context]
    if lost := lost_field(prompt, turns) or (lost_tool(prompt, tools) if tools else None):
        raise RejectedRow("template_drops", lost)
    return prompt


def response_text(frame: Frame, prompt: str, whole: str, answer: Message, number: int) -> str:
    """What the model has to write after the prompt."""
    if frame.empty_thought:
        whole = whole.replace(EMPTY, "", 1)
    if frame.opened:
        prompt = prompt.removesuffix(frame.opened)
    if not whole.startswith(prompt):
        raise RejectedRow("template_rewrites")
    response = whole[len(prompt) :]
    if frame.opened:
        thought, tag = answer.get(reasoning.FIELD, ""), frame.opened.split(">")[0].lstrip("<")
        lead = "" if frame.opened[-1].isspace() else "\n"
        response = f"{lead}{thought}\n</{tag}>\n\n{response}"
    if lost := lost_field(response, [answer], number):
        raise RejectedRow("template_drops", lost)
    return response.removesuffix(frame.drop) + frame.end if frame.end or frame.drop else response


def reasoning_key(template: ChatTemplate) -> str | None:
    """The name of the field from which the template reads the reasoning of an answer, if it reads any."""
    if "reasoning" not in template.known:
        question, answer = {"role": "user", "content": "mark1"}, {"role": "assistant", "content": "mark2"}
        keys = (name for name in REASONING if _writes(template, "mark3", [question, {**answer, name: "mark3"}]))
        template.known["reasoning"] = next(keys, None)
    return template.known["reasoning"]


def writes_system(template: ChatTemplate) -> bool:
    if "system" not in template.known:
        turns = [{"role": "system", "content": "mark1"}, {"role": "user", "content": "mark2"}]
        template.known["system"] = _writes(template, "mark1", turns)
    return template.known["system"]


def _moves_system(template: ChatTemplate) -> bool:
    """Whether a conversation that goes on does not begin with its system prompt any more."""
    if "moves_system" not in template.known:
        roles = ("system", "user", "assistant", "user", "assistant")
        turns = [{"role": role, "content": f"mark{number}"} for number, role in enumerate(roles, 1)]
        text = text_of(template, turns) or text_of(template, [{**t, "content": _parts(t["content"])} for t in turns])
        template.known["moves_system"] = "mark2" in text and "mark1" not in text.partition("mark2")[0]
    return template.known["moves_system"]


def _writes(template: ChatTemplate, mark: str, turns: list[Message]) -> bool:
    parts = [{**turn, "content": _parts(turn["content"])} for turn in turns]
    return any(mark in text_of(template, form) for form in (turns, parts))


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def end_of_turn(template: ChatTemplate, ids: Sequence[int]) -> int | None:
    """How many of a response's tokens there are up to its end; None if nothing ends it.

    What follows the contents is white space and special tokens. The first of them at which the model stops ends the
    turn (Phi-3 writes <|end|>, a newline and <|endoftext|>), or else the last special token.
    """
    start = len(ids)
    while start and (ids[start - 1] in template.end_ids or _is_blank(template, ids[start - 1])):
        start -= 1
    stops = (n + 1 for n in range(start, len(ids)) if ids[n] in template.stop_ids)
    ends = (n for n in range(len(ids), start, -1) if ids[n - 1] in template.end_ids)
    return next(stops, None) or next(ends, None)


def _is_blank(template: ChatTemplate, token: int) -> bool:
    blank = template.known.setdefault("blank", {})
    if token not in blank:
        blank[token] = not template.tokenizer.decode([token]).strip()
    return blank[token]


def answer_of(frame: Frame, answer: Message) -> Message:
    """The answer as it is rendered: its thought is put in afterwards where the template leaves it out."""
    if frame.empty_thought:
        return {**answer, reasoning.FIELD: EMPTY}
    return reasoning.stripped(answer) if frame.opened else answer


def _handed(template: ChatTemplate, form: Form, turn: Message) -> Message:
    made = reasoning.stripped(turn)
    if key := reasoning_key(template):
        made |= {key: turn[reasoning.FIELD]} if reasoning.FIELD in turn else {}
    elif reasoning.VERBATIM in turn or template.reasoning == "text":
        made = dict(reasoning.inline(turn))
    if "tool_calls" in made:
        made["tool_calls"] = [_with_arguments(call, form.text_arguments) for call in made["tool_calls"]]
        made["content"] = made["content"] or (None if form.none else "")
    if form.parts and made["content"] is not None:
        made["content"] = _parts(made["content"])
    return made


def _with_arguments(call: Any, as_text: bool) -> Any:
    function = call_function(call)
    arguments = parsed_arguments(function) or {}
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, default=str)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def text_of(template: ChatTemplate, turns: list[Message], tools: Any = None) -> str:
    """The rendered turns; empty if the template refuses them."""
    try:
        return str(render(template, turns, tools))
    except RejectedRow:
        return ""


def explained(template: ChatTemplate, rejected: RejectedRow, turns: Sequence[Message], tools: Any) -> RejectedRow:
    """The rejection with the template, and the setting that helps."""
    if rejected.name not in FIXES:
        return rejected
    detail = rejected.detail
    if rejected.name == "template_rewrites" and turns[0]["role"] == "system" and _moves_system(template):
        detail = MOVES_SYSTEM
    cause = detail if rejected.name == "template_drops" or detail in (SEVERAL, MOVES_SYSTEM) else _suspect(turns, tools)
    fix = next(fix for part, fix in FIXES[rejected.name].items() if part in cause)
    what = f"{detail}; {template.name}" if detail else template.name
    return RejectedRow(rejected.name, f"{what}. {fix}", rejected.content)


def _suspect(turns: Sequence[Message], tools: Any) -> str:
    """What a template that refuses a conversation, or rewrites it, probably does not expect."""
    if tools or any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns):
        return "`tools`"
    return "reasoning" if any(reasoning.FIELD in turn for turn in turns) else ""
