"""The data contract for each pair by itself: turn order, empty or equal texts, length. Checked in bulk by Arrow."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.dataset.rows.messages import Message, check_turns, to_text
from tasks.dataset.rows.preference import Preference
from tasks.dataset.rows.reject_reasons import RejectedRow


def check_pairs(preferences: Sequence[Preference], max_characters: int) -> list[RejectedRow | None]:
    """The first violation of each pair, None where there is none."""
    checks = [_check_turns(preference) for preference in preferences]
    texts = [(_prompt_text(p.prompt), _answer_text(p.chosen), _answer_text(p.rejected)) for p in preferences]
    for index, three in enumerate(texts):
        if checks[index] is None and not _is_unicode(three):
            checks[index] = RejectedRow("invalid_utf8", "half of a surrogate pair")
    valid = [index for index, rejected in enumerate(checks) if rejected is None]
    prompt, chosen, rejected = (pa.array([texts[index][part] for index in valid], pa.string()) for part in range(3))
    paired = pa.array([preferences[index].sign == 0 for index in valid], pa.bool_())
    for name, mask in _text_checks(prompt, chosen, rejected, paired, max_characters):
        for index in np.array(valid, dtype=int)[mask.to_numpy(zero_copy_only=False)]:
            checks[index] = checks[index] or RejectedRow(name)
    return checks


def _text_checks(prompt: Any, chosen: Any, rejected: Any, paired: Any, max_characters: int) -> list[tuple[str, Any]]:
    """(reject reason, mask of pairs), the most specific reason first."""
    empty = [pc.equal(pc.binary_length(text), 0) for text in (prompt, chosen, rejected)]
    long = [pc.greater(pc.utf8_length(text), max_characters) for text in (prompt, chosen, rejected)]
    return [
        ("empty_prompt", empty[0]),
        ("empty_answer", pc.or_(empty[1], empty[2])),
        ("equal_answers", pc.and_(paired, pc.equal(chosen, rejected))),
        ("absurd_length", pc.or_(pc.or_(long[0], long[1]), long[2])),
    ]


def _check_turns(preference: Preference) -> RejectedRow | None:
    try:
        check_turns(preference.prompt, preference.chosen)
        check_turns(preference.prompt, preference.rejected)
    except RejectedRow as rejected:
        return rejected
    return None


def _prompt_text(prompt: list[Message]) -> str:
    """Empty unless a user turn has content."""
    return to_text(prompt) if any(turn["role"] == "user" and turn["content"].strip() for turn in prompt) else ""


def _answer_text(answer: list[Message]) -> str:
    """Empty unless every assistant turn has content or a tool call."""
    turns = [turn for turn in answer if turn["role"] == "assistant"]
    return to_text(answer) if all(turn["content"].strip() or turn.get("tool_calls") for turn in turns) else ""


def _is_unicode(texts: tuple[str, str, str]) -> bool:
    try:
        "\n".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True
