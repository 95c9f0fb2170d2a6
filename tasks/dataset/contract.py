"""The contract for preference data: what each pair must be, what all of them must be, and how much may be amiss.

Pairs are checked in bulk: texts as Arrow columns, and what concerns several rows by hashes of 64 bits each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tasks.dataset.conversations import Conversation
from tasks.dataset.messages import Message, check_turns, text_of
from tasks.dataset.minhash import near_duplicates
from tasks.dataset.violations import BadRow

Mask = NDArray[np.bool_]


def check_pairs(conversations: Sequence[Conversation], max_characters: int) -> list[BadRow | None]:
    """What is wrong with each pair by itself, None where nothing is."""
    found = [_wrong_turns(one) for one in conversations]
    texts = [(_asked(one.prompt), _said(one.chosen), _said(one.rejected)) for one in conversations]
    sound = [n for n, three in enumerate(texts) if found[n] is None and _is_unicode(three)]
    for n in {n for n, bad in enumerate(found) if bad is None} - set(sound):
        found[n] = BadRow("invalid_utf8", "half of a surrogate pair")
    prompt, chosen, rejected = (pa.array([texts[n][part] for n in sound], pa.string()) for part in range(3))
    for name, mask in _wrong_texts(prompt, chosen, rejected, max_characters):
        for place in np.flatnonzero(mask.to_numpy(zero_copy_only=False)):
            found[sound[place]] = found[sound[place]] or BadRow(name)
    return found


def _wrong_texts(prompt: Any, chosen: Any, rejected: Any, most: int) -> list[tuple[str, Any]]:
    """(violation, mask), the more telling first."""
    empty = [pc.equal(pc.binary_length(text), 0) for text in (prompt, chosen, rejected)]
    long = [pc.greater(pc.utf8_length(text), most) for text in (prompt, chosen, rejected)]
    return [
        ("empty_prompt", empty[0]),
        ("empty_answer", pc.or_(empty[1], empty[2])),
        ("equal_answers", pc.equal(chosen, rejected)),
        ("absurd_length", pc.or_(pc.or_(long[0], long[1]), long[2])),
    ]


def _wrong_turns(one: Conversation) -> BadRow | None:
    try:
        check_turns(one.prompt, one.chosen)
        check_turns(one.prompt, one.rejected)
    except BadRow as bad:
        return bad
    return None


def _asked(prompt: list[Message]) -> str:
    """The prompt, where a user says something in it."""
    return text_of(prompt) if any(turn["role"] == "user" and turn["content"].strip() for turn in prompt) else ""


def _said(answer: list[Message]) -> str:
    """The answer, where every turn of the assistant says or calls something."""
    turns = [turn for turn in answer if turn["role"] == "assistant"]
    return text_of(answer) if all(turn["content"].strip() or turn.get("tool_calls") for turn in turns) else ""


def _is_unicode(texts: tuple[str, str, str]) -> bool:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_all(columns: Mapping[str, NDArray[Any]], near: float | None) -> dict[str, Mask]:
    """What is wrong with pairs beside other pairs: masks by violation, each pair under the first that applies."""
    size = len(columns["identity"])
    out, found = np.zeros(size, dtype=bool), {}

    def mark(name: str, mask: Mask) -> None:
        nonlocal out
        found[name] = mask & ~out
        out = out | mask

    mark("duplicate", ~_first(columns["identity"]))
    mark("contradiction", np.isin(columns["mirror"], columns["identity"]))
    named = columns["key"] != 0
    again = _rows_with_a_known_key(columns["row"][named], columns["key"][named])
    mark("id_not_unique", np.isin(columns["row"], again))
    held = columns["held"]
    mark("prompt_in_eval", ~held & np.isin(columns["prompt"], columns["prompt"][held & ~out]))
    if near is not None:
        kept = np.flatnonzero(~out)
        mask = np.zeros(size, dtype=bool)
        mask[kept] = near_duplicates(columns["signature"][kept], near)
        mark("near_duplicate", mask)
    return found


def _first(values: NDArray[Any]) -> Mask:
    """True where a value stands for the first time."""
    mask = np.zeros(len(values), dtype=bool)
    mask[np.unique(values, return_index=True)[1]] = True
    return mask


def _rows_with_a_known_key(rows: NDArray[Any], keys: NDArray[Any]) -> NDArray[Any]:
    """Rows whose id an earlier row has; the pairs that one row gave share theirs by right."""
    once = _first(rows)
    return rows[once][~_first(keys[once])]
