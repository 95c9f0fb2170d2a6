"""The turns of a conversation, converted from the formats that data sets use to {"role", "content"}."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, cycle, groupby, pairwise
from operator import itemgetter
from typing import Any

from tasks.source.reject_reasons import RawRow, RejectedRow

Message = dict[str, Any]

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **dict.fromkeys(("gpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython"), "tool"),
    **dict.fromkeys(("human", "prompter"), "user"),
    "developer": "system",
}
EXTRA_KEYS = ("tool_calls", "tool_call_id", "name")  # a chat template may read these too
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field; the first is ours
NOT_TEXT = ("image", "images", "image_url", "audio", "audios", "input_audio", "video", "videos")
TEXT_TYPES = ("text", "input_text", "output_text")  # of a content part; the latter two in OpenAI's responses
READ_KEYS = {"role", "from", "content", "value", "function_call", *EXTRA_KEYS, *REASONING}
SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def to_messages(value: Any, column: str, role: str) -> list[Message]:
    """Text becomes one turn of `role`; a list or a single object is read as messages with roles of their own."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if value is None:
        raise RejectedRow("missing_field", repr(column))
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        raise RejectedRow("not_text", column)
    return [_message(turn, column) for turn in turns]


def prompt_messages(row: RawRow, *columns: str) -> list[Message]:
    """The prompt, from the first of these columns that the row has. An `instruction` may have an `input`."""
    column = next((name for name in columns if name in row), columns[-1])
    if column != "instruction":
        value = row[column]
        return _text_prompt(value, column) if isinstance(value, str) else to_messages(value, column, "user")
    instruction = require_text(row["instruction"], "instruction")
    extra = require_text(row["input"], "input").strip() if row.get("input") is not None else ""
    return to_messages(f"{instruction}\n\n{extra}" if extra else instruction, column, "user")


def _text_prompt(value: str, column: str) -> list[Message]:
    """A prompt as text; in Anthropic's format it is a transcript that ends where the answer starts."""
    turns = parse_transcript(value, column) if value.startswith("\n\nHuman:") else []
    if turns and not turns[-1]["content"]:
        turns.pop()
    return turns if turns and turns[-1]["role"] == "user" else to_messages(value, column, "user")


def parse_transcript(value: Any, column: str) -> list[Message]:
    """A whole conversation: messages, or text in Anthropic's format. Successive turns of one speaker are joined."""
    if not isinstance(value, str):
        return to_messages(value, column, "assistant")
    start, *parts = SPEAKER.split(value)
    if start.strip() or not parts:
        raise RejectedRow("not_text", f"{column} is not a transcript; name the prompt's column in prepare.columns")
    turns = zip((ROLES[speaker.lower()] for speaker in parts[0::2]), map(str.strip, parts[1::2]), strict=True)
    return [
        {"role": role, "content": "\n\n".join(text for _, text in successive if text)}
        for role, successive in groupby(turns, key=itemgetter(0))
    ]


def join_lists(row: RawRow) -> RawRow:
    """LMSYS writes the turns of each speaker as a JSON list: prompt, chosen and rejected become two conversations."""
    lists = [_text_list(row.get(name)) for name in ("prompt", "chosen", "rejected")]
    if not all(lists) or len({len(texts) for texts in lists}) > 1:
        return row
    prompts, chosen, rejected = lists
    conversations = {"chosen": _alternate(prompts, chosen), "rejected": _alternate(prompts, rejected)}
    return {name: value for name, value in row.items() if name != "prompt"} | conversations


def _alternate(prompts: list[str], answers: list[str]) -> list[Message]:
    turns = chain.from_iterable(zip(prompts, answers, strict=True))
    return [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), turns, strict=False)]


def _text_list(value: Any) -> list[str]:
    """The texts of a JSON list; none where the value is anything else."""
    try:
        texts = json.loads(value) if isinstance(value, str) and value.startswith("[") else []
    except (ValueError, RecursionError):
        return []
    return texts if all(isinstance(text, str) for text in texts) else []


def answer_turns(value: Any, prompt: list[Message], column: str) -> list[Message]:
    """The turns of an answer, without the prompt where the answer repeats it."""
    turns = to_messages(value, column, "assistant")
    if turns[: len(prompt)] == prompt:
        return turns[len(prompt) :]
    question = [turn for turn in prompt if turn["role"] != "system"]
    start = next((n for n in range(len(turns)) if turns[n : n + len(question)] == question), None)
    if start is not None and all(turn["role"] == "system" for turn in turns[:start]):
        return turns[start + len(question) :]  # only one of the two has a system turn
    return turns


def shared_turns(first: Sequence[Message], second: Sequence[Message]) -> int:
    """How many turns two conversations share at their start."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def to_text(turns: Sequence[Message]) -> str:
    """Text for reports and hashes: the content of a single turn, or several turns with their roles."""
    if len(turns) == 1 and "tool_calls" not in turns[0]:
        return turns[0]["content"]
    calls = (f" {turn['tool_calls']}" if "tool_calls" in turn else "" for turn in turns)
    return "\n\n".join(f"{turn['role']}: {turn['content']}{call}" for turn, call in zip(turns, calls, strict=True))


def check_turns(prompt: Sequence[Message], answer: Sequence[Message]) -> None:
    """Reject any order but: system first, user and assistant alternating, the assistant last."""
    turns = [*prompt, *answer]
    roles = [turn["role"] for turn in turns]
    if not answer or roles[-1] != "assistant":
        raise RejectedRow("turn_order", "an answer does not end with the assistant")
    if "system" in roles[1:]:
        raise RejectedRow("turn_order", "a system turn is not the first turn")
    if "user" not in roles:
        raise RejectedRow("turn_order", "there is no user turn")
    for before, after in pairwise(turns):
        if before["role"] == after["role"] and after["role"] in ("user", "assistant") and "tool_calls" not in before:
            raise RejectedRow("turn_order", f"two {after['role']} turns in a row")
    if roles[len(prompt)] == "assistant" and roles[len(prompt) - 1] not in ("user", "tool"):
        raise RejectedRow("turn_order", "the prompt does not end with a user turn")


def require_text(value: Any, column: str) -> str:
    if value is None:
        raise RejectedRow("missing_field", repr(column))
    if not isinstance(value, str):
        raise RejectedRow("not_text", column)
    return value


def require_number(value: Any, column: str) -> float:
    try:
        parsed = float(value)
    except (TypeError, ValueError, OverflowError):
        parsed = math.nan
    if not math.isfinite(parsed):
        raise RejectedRow("bad_number", f"{column} is {value!r}")
    return parsed


def reject_media(holder: RawRow, where: str) -> None:
    """Reject what has images, audio or video beside its text: nothing but text is trained."""
    if name := next((name for name in NOT_TEXT if name in holder and not _is_empty(holder[name])), None):
        raise RejectedRow("unsupported_part", f"`{name}` of {where}; remove it if the text can stand alone")


def _is_empty(value: Any) -> bool:
    """Whether a field holds nothing: Arrow gives every object of a column the same keys, nested ones too."""
    return all(map(_is_empty, value.values())) if isinstance(value, dict) else not value


def unread_keys(row: RawRow) -> Iterator[str]:
    """The keys of a row's messages that nothing reads, such as an id or a language; once for each message."""
    for value in row.values():
        turns = value.get("messages") if isinstance(value, dict) and "messages" in value else value
        for turn in turns if isinstance(turns, list) else [turns]:
            if isinstance(turn, dict) and ("role" in turn or "from" in turn):
                yield from (str(name) for name in turn if name not in READ_KEYS and turn[name])


def _message(turn: Any, column: str) -> Message:
    if not isinstance(turn, dict):
        raise RejectedRow("not_text", f"a message of {column}")
    if isinstance(call := turn.get("function_call"), dict) and not turn.get("tool_calls"):  # OpenAI's old format
        turn = {**turn, "tool_calls": [{"type": "function", "function": call}]}
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    plain = len(turn) == 2 and content is not None  # a role and a content, as in nearly all messages
    if not plain:
        reject_media(turn, f"a message of {column}")
    if role is None or (content is None and not turn.get("tool_calls")):
        raise RejectedRow("missing_field", f"a message of {column} has no role or no content")
    if not isinstance(role, str) or role not in ROLES:
        raise RejectedRow("wrong_role", f"{role!r} in {column}")
    if content is not None and not isinstance(content, str):
        content = _join_parts(content, column)
    message = {"role": ROLES[role], "content": content or ""}
    return message if plain else message | _extra(turn, column)


def _extra(turn: RawRow, column: str) -> Message:
    extra = {name: turn[name] for name in EXTRA_KEYS if turn.get(name)}
    if isinstance(calls := extra.get("tool_calls"), str):  # as tables hold them
        with suppress(ValueError, RecursionError):
            extra["tool_calls"] = calls = json.loads(calls)
    if not calls:
        extra.pop("tool_calls", None)
    elif not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise RejectedRow("not_text", f"tool_calls of a message of {column}")
    reasoning = next((turn[name] for name in REASONING if turn.get(name)), None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise RejectedRow("not_text", f"the reasoning of a message of {column}")
    return {**extra, REASONING[0]: reasoning} if reasoning else extra


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function", call), dict)


def _join_parts(content: Any, column: str) -> str:
    """A list of content parts, if all of them are text: OpenAI's with the key `text`, LLaMA-Factory's with `value`."""
    parts = content if isinstance(content, list) else [content]
    return "".join(_part_text(part, column) for part in parts)


def _part_text(part: Any, column: str) -> str:
    named = part if isinstance(part, dict) else {}
    if (kind := named.get("type") or "text") not in TEXT_TYPES:
        raise RejectedRow("unsupported_part", f"a part of the type {kind!r} in a message of {column}")
    reject_media(named, f"a part of a message of {column}")
    text = named.get("text")
    text = named.get("value") if text is None and "type" in named else text
    if not isinstance(text, str):
        raise RejectedRow("not_text", f"the content of a message of {column}")
    return text
