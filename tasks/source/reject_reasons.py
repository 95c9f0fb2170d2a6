"""Why `prepare` rejects a row or a pair, by name. docs/data.md has the same list for users.

Rows in QUARANTINED are written to the quarantine and count against `prepare.max_bad_fraction`. Rows in SKIPPED are only
counted. `prepare.thresholds` sets a limit for any single reason.
"""

from typing import Any

RawRow = dict[str, Any]  # a row as the file holds it, by column

QUARANTINED = {
    "invalid_json": "the line is not valid JSON",
    "invalid_utf8": "the text is not valid UTF-8",
    "unreadable_value": "a value is outside the range of its type",
    "not_an_object": "the row is not an object with named columns",
    "missing_field": "a field is missing",
    "not_text": "a field is neither text nor messages",
    "bad_number": "a score, vote, label, margin or weight is not a usable value",
    "wrong_role": "a message has a role other than system, user, assistant or tool",
    "turn_order": "the turns are in an order that no conversation has",
    "no_shared_prompt": "chosen and rejected share no prompt",
    "empty_prompt": "the prompt is empty",
    "empty_answer": "an answer is empty",
    "equal_answers": "chosen and rejected are the same",
    "absurd_length": "a text is longer than prepare.max_characters",
    "unsupported_part": "a message has a part that is not text, such as an image",
    "template_refused": "the chat template raises an error for these turns",
    "template_drops": "the chat template does not write a part of the conversation",
    "template_rewrites": "the chat template changes the prompt once an answer follows",
    "nothing_left": "tokenization leaves nothing of the prompt or of an answer",
    "contradiction": "another row prefers the other answer to the same prompt, or rates the same answer the other way",
    "prompt_in_eval": "the prompt is also in the held-out data",
    "id_not_unique": "an earlier row has the same id",
}
SKIPPED = {
    "duplicate": "an exact duplicate of an earlier pair",
    "near_duplicate": "nearly the same words as an earlier pair",
    "over_length": "longer than prepare.max_tokens",
    "tie": "both answers have the same score or number of votes",
    "no_comparison": "the row has no two answers that somebody compared",
    "small_margin": "the scores differ by less than prepare.min_margin",
    "excluded": "the file source.exclude names the pair",
    "not_sampled": "outside the share of its source or the sample of prepare.max_pairs, or replaced by sampled answers",
}
REJECT_REASONS = QUARANTINED | SKIPPED
FIXES = {  # where most rows have the same fault
    "invalid_utf8": "Save it as UTF-8; for a file of an older Windows program: `iconv -f WINDOWS-1252 -t UTF-8`.",
    "template_drops": "The first row names the part, and the setting that keeps it.",
    "template_rewrites": "The first row names the setting that helps.",
    "invalid_json": "Write one JSON object per line, or give the file the suffix of its format, such as .csv.",
}


class RejectedRow(ValueError):
    """A row or pair that cannot be used: the name of the reason, and a detail."""

    def __init__(self, name: str, detail: str = "", content: Any = None) -> None:
        super().__init__(name, detail, content)  # what a pickle, for another process, is made from
        self.name, self.detail = name, detail
        self.content = content  # in reports, in place of a line that could not be parsed into a row

    def __str__(self) -> str:
        return f"{REJECT_REASONS[self.name]}{f' ({self.detail})' if self.detail else ''}"
