"""The data contract for each pair by itself: turn order, empty or equal texts, length."""

from tasks.prepare.rows.messages import Message, check_turns, to_text
from tasks.prepare.rows.preference import Preference
from tasks.source.reject_reasons import RejectedRow


def check_pair(preference: Preference, max_characters: int) -> RejectedRow | None:
    """The first violation, the most specific reason first; None if there is none."""
    try:
        check_turns(preference.prompt, preference.chosen)
        check_turns(preference.prompt, preference.rejected)
        prompt, chosen, rejected = texts = (
            _prompt_text(preference.prompt),
            _answer_text(preference.chosen),
            _answer_text(preference.rejected),
        )
        check_unicode(*texts)
    except RejectedRow as violation:
        return violation
    if not prompt:
        return RejectedRow("empty_prompt")
    if not (chosen and rejected):
        return RejectedRow("empty_answer")
    if chosen == rejected and preference.chosen == preference.rejected and not preference.sign:
        return RejectedRow("equal_answers")
    return RejectedRow("absurd_length") if max(map(len, texts)) > max_characters else None


def check_unicode(*texts: str) -> None:
    """Reject text that JSON can write and no tokenizer can read."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise RejectedRow("invalid_utf8", "half of a surrogate pair") from None


def _prompt_text(prompt: list[Message]) -> str:
    """Empty unless a user turn has content."""
    return to_text(prompt) if any(turn["role"] == "user" and turn["content"].strip() for turn in prompt) else ""


def _answer_text(answer: list[Message]) -> str:
    """Empty unless every assistant turn has content or a tool call."""
    turns = [turn for turn in answer if turn["role"] == "assistant"]
    return to_text(answer) if all(turn["content"].strip() or turn.get("tool_calls") for turn in turns) else ""
