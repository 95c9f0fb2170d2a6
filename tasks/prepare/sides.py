"""The texts of a pair: prompt and responses, in pieces of which each is in the loss or not.

The last turn of an answer is in the loss: its prompt is what the model is given to write it, all turns before it
included. With `prepare.loss_on: all` the assistant's other turns are in the loss as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntFlag
from itertools import takewhile
from typing import Any, NamedTuple

from tasks.prepare.frames import frame_of, opens_thought
from tasks.prepare.rendering import (
    SEVERAL,
    Frame,
    answer_of,
    check_frames,
    handed,
    prompt_text,
    response_text,
    writes_system,
)
from tasks.prepare.rows.contents import lost_field
from tasks.prepare.rows.messages import Message
from tasks.prepare.rows.preference import Preference
from tasks.prepare.rows.reasoning import CLOSE, FIELD, separate, stripped
from tasks.prepare.rows.tool_text import tools_as_text
from tasks.prepare.templates import ChatTemplate, render
from tasks.source.reject_reasons import RejectedRow


class Note(IntFlag):
    """What was done with a pair's texts that its user should know."""

    END_ADDED = 1
    REASONING_KEPT = 2
    REASONING_STRIPPED = 4
    EARLIER_REASONING_LEFT_OUT = 8
    EMPTY_THOUGHT = 16
    TOOLS_AS_TEXT = 32


NOTHING = Note(0)


class Side(NamedTuple):
    """One answer of a pair: the turns before its last one, that last turn, and how the template writes them."""

    context: list[Message]
    answer: Message
    frame: Frame

    def chat(self, template: ChatTemplate) -> list[Message]:
        return handed(template, self.frame.form, [*self.context, answer_of(self.frame, self.answer)])


def clear(template: ChatTemplate, preference: Preference) -> tuple[Preference, Note]:
    """The pair with reasoning in its field and, if `prepare.tools` asks for it, tools as text."""
    note = NOTHING
    sides = (preference.prompt, preference.chosen, preference.rejected)
    if template.tools == "text" and (preference.tools or any("tool_calls" in turn for side in sides for turn in side)):
        preference, note = tools_as_text(preference, writes_system(template)), Note.TOOLS_AS_TEXT
        sides = (preference.prompt, preference.chosen, preference.rejected)
    if not any(len(turn) > 2 or CLOSE in turn["content"] for side in sides for turn in side):
        return preference, note
    prompt, *answers = (separate(side, opens_thought(template)) for side in sides)
    if template.reasoning == "strip":
        note |= Note.REASONING_STRIPPED if any(FIELD in turn for side in answers for turn in side) else 0
        answers = [[stripped(turn) for turn in side] for side in answers]
    return replace(preference, prompt=prompt, chosen=answers[0], rejected=answers[1]), note


def side_of(template: ChatTemplate, pair: Preference, answer: list[Message]) -> Side:
    """The answer's last turn after all turns before it."""
    context = [*pair.prompt, *answer[:-1]]
    return Side(context, answer[-1], frame_of(template, context, answer[-1], pair.tools))


def notes_of(sides: Sequence[Side]) -> Note:
    note = NOTHING
    for _, answer, frame in sides:
        if len(answer) == 2 and not frame.remarkable:
            continue  # the most frequent case by far
        note |= Note.END_ADDED if frame.end else 0
        note |= Note.REASONING_KEPT if FIELD in answer else 0
        note |= Note.EARLIER_REASONING_LEFT_OUT if frame.earlier_dropped else 0
        note |= Note.EMPTY_THOUGHT if frame.empty_thought or (frame.opened and FIELD not in answer) else 0
    return note


def whole_texts(sides: Sequence[Side], tools: Any, prompt: Any, *wholes: Any) -> tuple[str, str, str] | RejectedRow:
    """Prompt, and prompt with each response, if nothing of the row is lost."""
    try:
        check_frames(*(side.frame for side in sides))
        if refused := next((text for text in (prompt, *wholes) if isinstance(text, RejectedRow)), None):
            raise refused
        prompt_text(prompt, sides[0].context, tools)
        chosen, rejected = (
            prompt + response_text(side.frame, prompt, whole, side.answer, len(side.context) + 1)
            for side, whole in zip(sides, wholes, strict=True)
        )
        return prompt, chosen, rejected
    except RejectedRow as rejected_row:
        return rejected_row


def prompt_of(template: ChatTemplate, side: Side, tools: Any) -> str:
    """What the model is given to write the last turn."""
    prompt = render(template, handed(template, side.frame.form, side.context), tools, generation=True)
    return prompt_text(prompt, side.context, tools)


def start_of(template: ChatTemplate, preference: Preference, sides: Sequence[Side], prompts: Sequence[str]) -> str:
    """The prompt that both answers continue.

    It is what the model is given to begin an answer with, unless that is rewritten once a turn follows: where no first
    turn is in the loss, both answers then continue what their texts share.
    """
    answers = (preference.chosen, preference.rejected)
    generation = all(answer[0]["role"] == "assistant" for answer in answers)
    turns = handed(template, sides[0].frame.form, preference.prompt)
    start = str(render(template, turns, preference.tools, generation))
    if all(prompt.startswith(start) for prompt in prompts):
        return start
    if template.loss_on == "all" or any(len(answer) == 1 for answer in answers):
        raise RejectedRow("template_rewrites", SEVERAL)
    shared = "".join(
        chars[0] for chars in takewhile(lambda chars: len({*chars}) == 1, zip(start, *prompts, strict=False))
    )
    at = max((0, *(shared.rfind(token) + len(token) for token in template.added_tokens if token in shared)))
    if not at or lost_field(shared[:at], [stripped(turn) for turn in preference.prompt]):
        raise RejectedRow("template_rewrites", SEVERAL)
    return shared[:at]


def pieces_of(
    template: ChatTemplate, preference: Preference, side: Side, start: str, prompt: str
) -> list[tuple[str, bool]]:
    """The text of an answer in pieces, each with whether it is in the loss. Only the assistant's text can be."""
    whole = render(template, side.chat(template), preference.tools)
    response = response_text(side.frame, prompt, whole, side.answer, len(side.context) + 1)
    pieces, end = [], len(start)
    if template.loss_on == "all":
        for n in range(len(preference.prompt), len(side.context)):
            if side.context[n]["role"] == "assistant":
                before, text = _turn_in(template, preference, side, n, prompt)
                pieces += [(prompt[end : len(before)], False), (text, True)]
                end = len(before) + len(text)
    pieces += [(prompt[end:], False), (response, True)]
    return [piece for piece in pieces if piece[0]]


def _turn_in(template: ChatTemplate, preference: Preference, side: Side, n: int, prompt: str) -> tuple[str, str]:
    """What the model is given to write turn n, and what it has to write, if the last turn's prompt has both."""
    context, answer = side.context[:n], side.context[n]
    frame = frame_of(template, context, answer, preference.tools)
    check_frames(frame)
    turn = Side(context, answer, frame)
    before = prompt_of(template, turn, preference.tools)
    after = str(render(template, turn.chat(template), preference.tools))
    if not (prompt.startswith(before) and prompt.startswith(after)):
        raise RejectedRow("template_rewrites", SEVERAL)
    text = response_text(replace(frame, drop="", end=""), before, after, answer, n + 1)
    follows = prompt[len(before) + len(text) :]
    return before, text + (frame.end if frame.end and follows.startswith(frame.end) else "")
