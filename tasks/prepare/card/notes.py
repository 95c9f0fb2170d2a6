"""What was done with the texts of pairs between row and tokens, in sentences: the data card, and `dpo init`."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tasks.prepare.sides import Note

SENTENCES = {
    Note.END_ADDED: "the chat template writes no end of an answer, and the model's end token was added",
    Note.REASONING_KEPT: "an answer has reasoning, which is trained (prepare.reasoning: strip leaves it out)",
    Note.REASONING_STRIPPED: "the reasoning of an answer was left out (prepare.reasoning: strip)",
    Note.EARLIER_REASONING_LEFT_OUT: "the chat template leaves the reasoning of earlier turns out of the prompt",
    Note.EMPTY_THOUGHT: "the prompt opens a thought and an answer has no reasoning, so the answer closes it at once",
    Note.TOOLS_AS_TEXT: "tools, calls and results are written as text (prepare.tools: text)",
}
KEYS = 8  # of messages that are named


def count_notes(notes: NDArray[np.uint8]) -> dict[str, int]:
    """How many pairs have each note, by its name; without those that none has."""
    counts = {str(note.name).lower(): int((notes & note.value > 0).sum()) for note in Note}
    return {name: count for name, count in counts.items() if count}


def sentences(notes: Mapping[str, int], unread: Mapping[str, int]) -> list[str]:
    made = [f"{count} pairs: {SENTENCES[Note[name.upper()]]}." for name, count in notes.items()]
    if unread:
        named = ", ".join(f"{name} ({count})" for name, count in list(unread.items())[:KEYS])
        made.append(f"Keys of messages that are not read: {named}{', ...' if len(unread) > KEYS else ''}.")
    return made
