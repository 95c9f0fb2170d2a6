"""Row shapes: the column layouts in which preference data comes. docs/data.md shows them.

To add a shape, write a function from a row to preferences, add it to SHAPES and its name to tasks/config/names.py.
A row with several ranked or scored answers gives several preferences.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from tasks.prepare.rows import messages
from tasks.prepare.rows.preference import MaybePreference, Preference, RowLayout
from tasks.prepare.rows.rankings import answer_text, apply_scores, compare_two, from_ranking
from tasks.prepare.rows.trees import from_tree, is_tree
from tasks.prepare.rows.vote_values import vote_key
from tasks.source.reject_reasons import RawRow, RejectedRow

ALIASES = {
    "prompt": ("question", "input"),
    "chosen": ("chosen_response", "response_j", "chosen_messages"),
    "rejected": ("rejected_response", "response_k", "rejected_messages"),
    "messages": ("conversations", "conversation"),
    "completions": ("responses", "answers"),
    "score_chosen": ("chosen_score", "chosen_rating"),
    "score_rejected": ("rejected_score", "rejected_rating"),
    "label": ("kto_tag",),
}


def rename_columns(row: RawRow, columns: Mapping[str, str]) -> RawRow:
    """The row under our column names: first as `prepare.columns` maps them, then by common aliases."""
    mapped = set(columns.values())
    renamed = {name: value for name, value in row.items() if name not in mapped}
    renamed |= {name: value_of(row, column) for name, column in columns.items() if has_column(row, column)}
    if "prompt" in columns and "instruction" not in columns:
        renamed.pop("instruction", None)  # the configured column is the prompt
    for name, aliases in ALIASES.items():
        if name == "prompt" and ("instruction" in renamed or not isinstance(renamed.get("input", ""), str)):
            continue  # `input` belongs to the instruction, or is OpenAI's object
        alias = next((alias for alias in aliases if alias in renamed), None)
        if name not in renamed and alias:
            renamed[name] = renamed.pop(alias)
    return renamed


def has_column(row: RawRow, column: str) -> bool:
    """`info.post` is the field `post` of the object in the column `info`."""
    head, _, rest = column.partition(".")
    nested = row.get(head)
    return column in row or (bool(rest) and isinstance(nested, dict) and has_column(nested, rest))


def value_of(row: RawRow, column: str) -> Any:
    head, _, rest = column.partition(".")
    return row[column] if column in row else value_of(row[head], rest)


def detect_shape(row: RawRow) -> str | None:
    """The name of the shape whose columns the (renamed) row has."""
    return next((name for name, shape in SHAPES.items() if shape.matches(row)), None)


def to_preferences(row: RawRow, layout: RowLayout) -> list[MaybePreference]:
    """The preferences of a row, or the reason why there are none. One pair of a row may be a tie and others not."""
    row = rename_columns(row, layout.columns)
    try:
        messages.reject_media(row, "the row")
        pairs = SHAPES[layout.shape].read(row, layout)
        return [_add_fields(pair, row, layout.columns) if isinstance(pair, Preference) else pair for pair in pairs]
    except RejectedRow as rejected:
        return [rejected]
    except KeyError as error:
        return [RejectedRow("missing_field", str(error))]


def _add_fields(preference: Preference, row: RawRow, columns: Mapping[str, str]) -> Preference:
    """Fields that any shape may have: a system prompt, tools, and the numbers that `prepare.columns` names."""
    if system := row.get("system"):
        prompt = [{"role": "system", "content": messages.require_text(system, "system")}, *preference.prompt]
        preference = replace(preference, prompt=prompt)
    names = ("margin", "weight") if preference.sign else ("label", "margin", "weight")
    fields: dict[str, Any] = {n: messages.require_number(row[n], n) for n in names if n in columns}
    if not 0.0 <= fields.get("label", 1.0) <= 1.0 or fields.get("weight", 1.0) < 0.0:
        raise RejectedRow("bad_number", f"label {fields.get('label')}, weight {fields.get('weight')}")
    if row.get("tools"):
        fields["tools"] = parse_tools(row["tools"])
    return replace(preference, **fields) if fields else preference


def parse_tools(value: Any) -> list[Any]:
    """Tool descriptions; tables hold them as JSON text."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RejectedRow("not_text", "tools is not a list of objects")
    return tools


def _openai(row: RawRow, layout: RowLayout) -> list[MaybePreference]:
    """OpenAI's preference files: input.messages, preferred_output, non_preferred_output."""
    request = row["input"]
    if not isinstance(request, dict) or "messages" not in request:
        raise RejectedRow("missing_field", "'input.messages'")
    tools = parse_tools(request["tools"]) if request.get("tools") else None
    sides = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    prompt = messages.to_messages(request["messages"], "input.messages", "user")
    pair = _two_sides(prompt, {**row, **sides}, layout)
    return [replace(pair, tools=tools) if isinstance(pair, Preference) else pair]


def _prompt_in(*columns: str) -> Callable[[RawRow, RowLayout], list[MaybePreference]]:
    """For rows with chosen and rejected (text, messages, or lists of answers), and a prompt in one of these columns.

    Without a column both sides are whole conversations.
    """

    def read(row: RawRow, layout: RowLayout) -> list[MaybePreference]:
        prompt = messages.prompt_messages(row, *columns) if columns else []
        return [_two_sides(prompt, one, layout) for one in _each_pair(row, layout.expand)]

    return read


def _each_pair(row: RawRow, expand: str) -> list[RawRow]:
    """RM-Bench lists several chosen and several rejected answers: a row for each pair that `prepare.expand` asks for.

    `all` compares every chosen with every rejected answer, the others those at the same place of both lists.
    """
    lists = [_answer_list(row["chosen"]), _answer_list(row["rejected"])]
    if lists == [None, None]:
        return [row]
    chosen, rejected = (found or [row[side]] for side, found in zip(("chosen", "rejected"), lists, strict=True))
    size = max(len(chosen), len(rejected))  # every answer is used: the shorter list starts again
    side_by_side = ((chosen[n % len(chosen)], rejected[n % len(rejected)]) for n in range(size))
    pairs = product(chosen, rejected) if expand == "all" else side_by_side
    return [{**row, "chosen": better, "rejected": worse} for better, worse in pairs]


def _answer_list(value: Any) -> list[Any] | None:
    """Several answers; None for a single one, which may be a list of messages."""
    if not isinstance(value, list) or not value:
        return None
    is_message = isinstance(value[0], dict) and value[0].keys() & {"role", "from"}
    return None if is_message else [answer_text(answer) for answer in value]


def _two_sides(prompt: list[messages.Message], row: RawRow, layout: RowLayout) -> MaybePreference:
    """The turns that chosen and rejected share belong to the prompt; the rest of each side is an answer.

    Without a prompt both sides are whole conversations.
    """
    if prompt:
        chosen, rejected = (messages.answer_turns(row[side], prompt, side) for side in ("chosen", "rejected"))
        whole = all(side and side[0]["role"] in ("system", "user") for side in (chosen, rejected))
        if whole and prompt[-1]["role"] == "user":
            prompt = []  # it repeats a part of the two conversations, such as their last question
    else:
        chosen, rejected = (messages.parse_transcript(row[side], side) for side in ("chosen", "rejected"))
    shared = messages.shared_turns(chosen, rejected)
    prompt, chosen, rejected = prompt + chosen[:shared], chosen[shared:], rejected[shared:]
    if not chosen and not rejected:
        raise RejectedRow("equal_answers")
    if not prompt:
        raise RejectedRow("no_shared_prompt")
    return apply_scores(Preference(prompt, chosen, rejected), row, layout)


def _from_votes(row: RawRow, layout: RowLayout) -> list[MaybePreference]:
    """Two answers with votes or scores. Without a prompt the two are whole conversations."""
    row, label = compare_two(row, layout)
    row = messages.join_lists(row)
    has_prompt = row.keys() & {"instruction", "prompt"}
    pair = _two_sides(messages.prompt_messages(row, "instruction", "prompt") if has_prompt else [], row, layout)
    return [replace(pair, label=label) if label < 1.0 and isinstance(pair, Preference) else pair]


def _unpaired(row: RawRow, layout: RowLayout) -> list[MaybePreference]:
    """One answer with a label. A pair, where `prepare.format` asks for it, is a desirable and an undesirable answer."""
    shape = detect_shape(row)
    if "completion" not in row and shape not in (None, "unpaired", "votes"):
        return [answer for pair in SHAPES[shape].read(row, layout) for answer in _both_answers(pair)]
    prompt, answer = _single_answer(row)
    if (label := layout.votes.get(vote_key(row["label"]))) is None:
        raise RejectedRow("bad_number", f"the label {row['label']!r}; known: {', '.join(layout.votes)}")
    return [Preference(prompt, answer, answer, sign=1 if label == "desirable" else -1)]


def _single_answer(row: RawRow) -> tuple[list[messages.Message], list[messages.Message]]:
    """Prompt and answer: two columns, or a conversation whose last turns are the answer (LLaMA-Factory's KTO files)."""
    column = next((name for name in ("completion", "output") if name in row), None)
    if column is None and "messages" in row:
        turns = messages.to_messages(row["messages"], "messages", "user")
        start = max((n + 1 for n, turn in enumerate(turns) if turn["role"] == "user"), default=0)
        return turns[:start], turns[start:]
    prompt = messages.prompt_messages(row, "instruction", "prompt", "messages")
    column = column or "completion"
    return prompt, messages.answer_turns(row[column], prompt, column)


def _both_answers(pair: MaybePreference) -> list[MaybePreference]:
    if not isinstance(pair, Preference):
        return [pair]
    return [replace(pair, rejected=pair.chosen, sign=1), replace(pair, chosen=pair.rejected, sign=-1)]


def _has_votes(row: RawRow) -> bool:
    if "annotator1" in row:
        return {"response1", "response2"} <= row.keys()
    listed = row.get("completions")
    answers = {"response1", "response2"} <= row.keys() or (isinstance(listed, list) and len(listed) == 2)
    decided = "winner" in row or {"score1", "score2"} <= row.keys()
    return answers and decided and "chosen" not in row


def _has(*names: str) -> Callable[[RawRow], bool]:
    return lambda row: set(names) <= row.keys()


def _has_single_answer(row: RawRow) -> bool:
    two_columns = row.keys() & {"completion", "output"} and row.keys() & {"prompt", "instruction"}
    return "label" in row and ("messages" in row or bool(two_columns))


def _has_completions(row: RawRow) -> bool:
    return "completions" in row and ("prompt" in row or "instruction" in row)


class Shape(NamedTuple):
    matches: Callable[[RawRow], bool]
    read: Callable[[RawRow, RowLayout], list[MaybePreference]]


# The first shape that matches is used, so the most specific is first:
# rows with a prompt and `messages` are pairs, since `messages` then repeats the prompt with the chosen answer.
SHAPES: dict[str, Shape] = {
    "openai": Shape(_has("input", "preferred_output", "non_preferred_output"), _openai),
    "votes": Shape(_has_votes, _from_votes),
    "pairs": Shape(_has("prompt", "chosen", "rejected"), _prompt_in("prompt")),
    "messages": Shape(_has("messages", "chosen", "rejected"), _prompt_in("messages")),
    "instruction": Shape(_has("instruction", "chosen", "rejected"), _prompt_in("instruction", "prompt")),
    "transcript": Shape(_has("chosen", "rejected"), _prompt_in()),
    "scored": Shape(lambda row: _has_completions(row) and "scores" in row, from_ranking),
    "ranked": Shape(_has_completions, from_ranking),
    "alpaca": Shape(
        lambda row: "instruction" in row and isinstance(row.get("output"), list),
        lambda row, layout: from_ranking({**row, "completions": row["output"]}, layout),
    ),
    "tree": Shape(is_tree, from_tree),
    "unpaired": Shape(_has_single_answer, _unpaired),
}
