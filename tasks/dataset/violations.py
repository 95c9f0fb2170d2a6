"""What can be wrong with a row, by name. docs/data.md has the same list for users.

A bad row goes to the quarantine and counts against `prepare.max_bad_fraction`; one that is only left out (a duplicate,
a pair that is too long) is counted and nothing more. `prepare.thresholds` sets a limit for any one of them.
"""

from typing import Any

BAD = {
    "invalid_json": "the line is not valid JSON",
    "invalid_utf8": "the text is not valid UTF-8",
    "unreadable_value": "a value is outside the range of its type",
    "not_an_object": "the row is not an object with named columns",
    "missing_field": "a field is missing",
    "not_text": "a field is neither text nor messages",
    "bad_number": "a score, vote, label, margin or weight is not a number that can be used",
    "wrong_role": "a message has a role that is not system, user, assistant or tool",
    "turn_order": "the turns are not in an order that a conversation has",
    "no_shared_prompt": "chosen and rejected have no prompt in common",
    "empty_prompt": "the prompt is empty",
    "empty_answer": "an answer is empty",
    "equal_answers": "chosen and rejected are the same",
    "absurd_length": "a text is longer than prepare.max_characters",
    "template_refused": "the chat template refuses the turns",
    "template_rewrites": "the chat template changes the prompt once there is an answer",
    "nothing_left": "nothing is left of the prompt or of an answer after tokenising",
    "contradiction": "another row prefers the other answer to the same prompt",
    "prompt_in_eval": "the prompt is among the held-out data's",
    "id_not_unique": "another row has the same id",
}
LEFT_OUT = {
    "duplicate": "an exact duplicate of an earlier pair",
    "near_duplicate": "nearly the same words as an earlier pair",
    "over_length": "longer than prepare.max_tokens",
    "tie": "both answers have the same score or as many votes",
    "small_margin": "the scores differ by less than prepare.min_margin",
    "not_sampled": "outside the share of its source",
}
VIOLATIONS = BAD | LEFT_OUT


class BadRow(ValueError):
    """A row or pair that cannot be used, by the violation's name and what it is about."""

    def __init__(self, name: str, detail: str = "", content: Any = None) -> None:
        assert name in VIOLATIONS, name
        super().__init__(f"{VIOLATIONS[name]}{f' ({detail})' if detail else ''}")
        self.name, self.detail = name, detail
        self.content = content  # of a line that never became a row

    def __reduce__(self) -> tuple[type["BadRow"], tuple[str, str, Any]]:
        return BadRow, (self.name, self.detail, self.content)  # for a worker of its own process
