"""Row shapes: how preference data says which answer is better. Each is an entry of SHAPES; docs/data.md shows them.

A row becomes Conversations: the messages that both sides share, and the messages of each side from there on. A row with
several ranked or scored answers becomes several.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tasks.dataset.conversations import Choices, Conversation, Pairing, Row, asked, number, text
from tasks.dataset.messages import Message, common_prefix, from_text, own_turns, to_messages
from tasks.dataset.rankings import alpaca, by_score, ranked, votes
from tasks.dataset.violations import BadRow
from tasks.errors import UserError

# What prepare.columns may name.
COLUMNS = (
    *("prompt", "chosen", "rejected", "instruction", "input", "system", "messages", "tools"),
    *("completions", "scores", "output", "response1", "response2", "annotator1"),
    *("score_chosen", "score_rejected", "label", "margin", "weight", "id"),
)
ALIASES = {
    "prompt": ("question", "input"),
    "messages": ("conversations", "conversation"),
    "completions": ("responses", "answers"),
    "score_chosen": ("chosen_score", "chosen_rating"),
    "score_rejected": ("rejected_score", "rejected_rating"),
}


def rename(row: Row, columns: Mapping[str, str]) -> Row:
    """Columns under our names: as the user maps them, then as others are known to call them."""
    theirs = set(columns.values())
    ours = {name: value for name, value in row.items() if name not in theirs}
    ours |= {name: row[column] for name, column in columns.items() if column in row}
    for name, aliases in ALIASES.items():
        if name == "prompt" and ("instruction" in ours or not isinstance(ours.get("input", ""), str)):
            continue  # then `input` is another thing
        found = next((alias for alias in aliases if alias in ours), None)
        if name not in ours and found:
            ours[name] = ours.pop(found)
    return ours


def detect(row: Row) -> str:
    """Which of our shapes a row has, by its columns (already renamed)."""
    for name, (fits, _) in SHAPES.items():
        if fits(row):
            return name
    if {"prompt", "completion", "label"} <= row.keys():
        raise UserError(
            "The rows are binary feedback (prompt, completion, label): one answer each, marked good or bad. DPO needs "
            "two answers to one prompt; join a good and a bad one into prompt, chosen, rejected."
        )
    raise UserError(
        f"The rows have the columns {', '.join(map(str, row))}, which is no shape that we know "
        f"({', '.join(SHAPES)}; see docs/data.md). "
        "Name the columns in prepare.columns, for example {prompt: question, chosen: good, rejected: bad}."
    )


def to_conversations(row: Row, shape: str, declared: Mapping[str, str], choices: Choices) -> list[Pairing]:
    """The pairs of a row, or why there are none; one of several pairs may be a tie and the others not."""
    try:
        made = SHAPES[shape][1](row, choices)
        return [_finish(one, row, declared) if isinstance(one, Conversation) else one for one in made]
    except BadRow as bad:
        return [bad]
    except KeyError as error:
        return [BadRow("missing_field", str(error))]


def _finish(conversation: Conversation, row: Row, declared: Mapping[str, str]) -> Conversation:
    """What any shape may have besides: a system prompt, tools, numbers that the user has named."""
    if system := row.get("system"):
        prompt = [{"role": "system", "content": text(system, "system")}, *conversation.prompt]
        conversation = replace(conversation, prompt=prompt)
    more: dict[str, Any] = {n: number(row[n], n) for n in ("label", "margin", "weight") if n in declared}
    if not 0.0 <= more.get("label", 1.0) <= 1.0 or more.get("weight", 1.0) < 0.0:
        raise BadRow("bad_number", f"label {more.get('label')}, weight {more.get('weight')}")
    if row.get("tools"):
        more["tools"] = _tools(row["tools"])
    return replace(conversation, **more) if more else conversation


def _tools(value: Any) -> list[Any]:
    """Descriptions of tools, also as the JSON text that tables hold."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise BadRow("not_text", "tools is not a list")
    return found


def _pairs(row: Row, choices: Choices) -> list[Pairing]:
    """prompt, chosen, rejected: text or messages; an answer may repeat the prompt's messages."""
    if row["prompt"] is None:
        raise BadRow("missing_field", "'prompt'")
    return _two_sides(to_messages(row["prompt"], "prompt", "user"), row, choices)


def _instruction(row: Row, choices: Choices) -> list[Pairing]:
    return _two_sides(asked(row), row, choices)


def _messages(row: Row, choices: Choices) -> list[Pairing]:
    """ShareGPT's or OpenAI's messages up to the answer, and the two answers beside them."""
    return _two_sides(to_messages(row["messages"], "messages", "user"), row, choices)


def _openai(row: Row, choices: Choices) -> list[Pairing]:
    """OpenAI's preference files: input.messages, preferred_output, non_preferred_output."""
    asked = row["input"]
    if not isinstance(asked, dict) or "messages" not in asked:
        raise BadRow("missing_field", "'input.messages'")
    sides = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"], "tools": asked.get("tools")}
    made = _two_sides(to_messages(asked["messages"], "input.messages", "user"), {**row, **sides}, choices)
    return [replace(one, tools=sides["tools"] or None) if isinstance(one, Conversation) else one for one in made]


def _transcript(row: Row, choices: Choices) -> list[Pairing]:
    """Both conversations whole, as Anthropic's text or as messages."""
    return _two_sides([], row, choices)


def _two_sides(prompt: list[Message], row: Row, choices: Choices) -> list[Pairing]:
    """What chosen and rejected have in common is the prompt, and what is left of each is an answer."""
    if prompt:
        chosen, rejected = (own_turns(row[side], prompt, side) for side in ("chosen", "rejected"))
    else:
        chosen, rejected = (from_text(row[side], side) for side in ("chosen", "rejected"))
    shared = common_prefix(chosen, rejected)
    prompt, chosen, rejected = prompt + chosen[:shared], chosen[shared:], rejected[shared:]
    if not chosen and not rejected:
        raise BadRow("equal_answers")
    if not prompt:
        raise BadRow("no_shared_prompt")
    return [by_score(Conversation(prompt, chosen, rejected), row, choices)]


def _has(*names: str) -> Callable[[Row], bool]:
    return lambda row: set(names) <= row.keys()


def _has_answers(row: Row) -> bool:
    return "completions" in row and ("prompt" in row or "instruction" in row)


Shape = tuple[Callable[[Row], bool], Callable[[Row, Choices], list[Pairing]]]
# In this order: the first that fits is the one.
SHAPES: dict[str, Shape] = {
    "openai": (_has("input", "preferred_output", "non_preferred_output"), _openai),
    "votes": (_has("response1", "response2", "annotator1"), votes),
    "messages": (_has("messages", "chosen", "rejected"), _messages),
    "pairs": (_has("prompt", "chosen", "rejected"), _pairs),
    "instruction": (_has("instruction", "chosen", "rejected"), _instruction),
    "transcript": (_has("chosen", "rejected"), _transcript),
    "scored": (lambda row: _has_answers(row) and "scores" in row, ranked),
    "ranked": (_has_answers, ranked),
    "alpaca": (lambda row: "instruction" in row and isinstance(row.get("output"), list), alpaca),
}
