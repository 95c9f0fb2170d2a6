"""Row shapes: how preference data says which answer is better. Each is an entry of SHAPES; docs/data.md shows them.

A row becomes Conversations: the messages that both sides share, and the messages of each side from there on. A row with
several ranked or scored answers becomes several.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

from tasks.errors import UserError
from tasks.messages import Message, common_prefix, from_text, own_turns, to_messages
from tasks.violations import BadRow

Row = dict[str, Any]

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


@dataclass(frozen=True)
class Conversation:
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    label: float = 1.0  # how likely it is that chosen is the better one
    margin: float = 0.0  # by how much, where there are scores
    weight: float = 1.0
    tools: list[Any] | None = None


Pairing = Conversation | BadRow


@dataclass(frozen=True)
class Choices:
    """How answers become pairs."""

    expand: str = "best_rest"
    min_margin: float = 0.0
    ties: str = "drop"


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
        prompt = [{"role": "system", "content": _text(system, "system")}, *conversation.prompt]
        conversation = replace(conversation, prompt=prompt)
    numbers: dict[str, Any] = {
        name: _number(row[name], name) for name in ("label", "margin", "weight") if name in declared
    }
    if not 0.0 <= numbers.get("label", 1.0) <= 1.0 or numbers.get("weight", 1.0) < 0.0:
        raise BadRow("bad_number", f"label {numbers.get('label')}, weight {numbers.get('weight')}")
    return (
        replace(conversation, **numbers, tools=row.get("tools") or None)
        if numbers or row.get("tools")
        else conversation
    )


def _pairs(row: Row, choices: Choices) -> list[Pairing]:
    """prompt, chosen, rejected: text or messages; an answer may repeat the prompt's messages."""
    if row["prompt"] is None:
        raise BadRow("missing_field", "'prompt'")
    return _two_sides(to_messages(row["prompt"], "prompt", "user"), row, choices)


def _instruction(row: Row, choices: Choices) -> list[Pairing]:
    return _two_sides(_asked(row), row, choices)


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
    return [_by_score(Conversation(prompt, chosen, rejected), row, choices)]


def _by_score(conversation: Conversation, row: Row, choices: Choices) -> Pairing:
    if row.get("score_chosen") is None or row.get("score_rejected") is None:
        return conversation
    better, worse = _number(row["score_chosen"], "score_chosen"), _number(row["score_rejected"], "score_rejected")
    return _scored_pair(conversation, better - worse, choices)


def _scored_pair(conversation: Conversation, margin: float, choices: Choices) -> Pairing:
    if margin == 0.0:
        return BadRow("tie") if choices.ties == "drop" else replace(conversation, label=0.5)
    if abs(margin) < choices.min_margin:
        return BadRow("small_margin", f"{margin:g}")
    if margin < 0.0:
        return BadRow("bad_number", f"rejected scores {-margin:g} more than chosen")
    return replace(conversation, margin=margin)


def _votes(row: Row, choices: Choices) -> list[Pairing]:
    """PandaLM: response1, response2, and votes annotator1, annotator2, ...: 1 or 2 is the better one, 0 a tie."""
    votes = [value for name, value in row.items() if name.startswith("annotator") and value is not None]
    if not votes or any(vote not in (0, 1, 2) for vote in votes):
        raise BadRow("bad_number", f"votes {votes}")
    first = sum({0: 0.5, 1: 1.0, 2: 0.0}[vote] for vote in votes) / len(votes)
    sides = [to_messages(row[side], side, "assistant") for side in ("response1", "response2")]
    prompt = _asked(row) if "instruction" in row else to_messages(row["prompt"], "prompt", "user")
    if first == 0.5 and choices.ties == "drop":
        return [BadRow("tie")]
    better, worse = sides if first >= 0.5 else sides[::-1]
    return [Conversation(prompt, better, worse, label=max(first, 1.0 - first))]


def _ranked(row: Row, choices: Choices) -> list[Pairing]:
    """Several answers to one prompt, the best first; or with scores, in any order."""
    answers = row["completions"]
    if not isinstance(answers, list) or len(answers) < 2:
        raise BadRow("not_text", "completions is not a list of two or more answers")
    scores = row.get("scores")
    if scores is None and all(isinstance(answer, dict) and _score_key(answer) for answer in answers):
        scores = [answer[_score_key(answer)] for answer in answers]
    texts = [to_messages(_answer_text(answer), "completions", "assistant") for answer in answers]
    prompt = _asked(row) if "instruction" in row else to_messages(row["prompt"], "prompt", "user")
    if scores is None:
        order = list(range(len(texts)))
        return [Conversation(prompt, texts[a], texts[b]) for a, b in _expand(order, choices.expand)]
    if not isinstance(scores, list) or len(scores) != len(texts):
        raise BadRow("bad_number", f"{len(texts)} completions and scores {scores}")
    numbers = [_number(score, "scores") for score in scores]
    order = sorted(range(len(texts)), key=lambda place: (-numbers[place], place))
    return [
        _scored_pair(Conversation(prompt, texts[a], texts[b]), numbers[a] - numbers[b], choices)
        for a, b in _expand(order, choices.expand)
    ]


def _alpaca(row: Row, choices: Choices) -> list[Pairing]:
    """instruction, input, and a list `output`, the best first."""
    return _ranked({**row, "completions": row["output"]}, choices)


def _expand(order: list[int], how: str) -> list[tuple[int, int]]:
    """Pairs (better, worse) of answers in the order of their rank."""
    if how == "all":
        return list(combinations(order, 2))
    return list(pairwise(order)) if how == "adjacent" else [(order[0], rest) for rest in order[1:]]


def _asked(row: Row) -> list[Message]:
    """An instruction and its input as the user's turn."""
    text = _text(row["instruction"], "instruction")
    extra = _text(row["input"], "input").strip() if row.get("input") is not None else ""
    return [{"role": "user", "content": f"{text}\n\n{extra}" if extra else text}]


def _answer_text(answer: Any) -> Any:
    """An answer that is an object carries its text under one of these names."""
    if not isinstance(answer, dict) or "role" in answer or "from" in answer:
        return answer
    return next((answer[name] for name in ("response", "text", "content", "completion") if name in answer), None)


def _score_key(answer: dict[str, Any]) -> str | None:
    return next((name for name in ("score", "overall_score", "rating", "reward") if name in answer), None)


def _text(value: Any, column: str) -> str:
    if value is None:
        raise BadRow("missing_field", repr(column))
    if not isinstance(value, str):
        raise BadRow("not_text", column)
    return value


def _number(value: Any, column: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadRow("bad_number", f"{column} is {value!r}") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise BadRow("bad_number", f"{column} is {value!r}")
    return number


def _has(*names: str) -> Callable[[Row], bool]:
    return lambda row: set(names) <= row.keys()


def _has_answers(row: Row) -> bool:
    return "completions" in row and ("prompt" in row or "instruction" in row)


Shape = tuple[Callable[[Row], bool], Callable[[Row, Choices], list[Pairing]]]
# In this order: the first that fits is the one.
SHAPES: dict[str, Shape] = {
    "openai": (_has("input", "preferred_output", "non_preferred_output"), _openai),
    "votes": (_has("response1", "response2", "annotator1"), _votes),
    "messages": (_has("messages", "chosen", "rejected"), _messages),
    "pairs": (_has("prompt", "chosen", "rejected"), _pairs),
    "instruction": (_has("instruction", "chosen", "rejected"), _instruction),
    "transcript": (_has("chosen", "rejected"), _transcript),
    "scored": (lambda row: _has_answers(row) and "scores" in row, _ranked),
    "ranked": (_has_answers, _ranked),
    "alpaca": (lambda row: "instruction" in row and isinstance(row.get("output"), list), _alpaca),
}
