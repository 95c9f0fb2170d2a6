"""A preference: one prompt with a chosen and a rejected answer, and the hashes that identify it.

The hashes are the same on every machine and depend on the content alone.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tasks.prepare.rows.messages import Message, to_text
from tasks.source.reject_reasons import RejectedRow

HASH_RANGE = 1 << 64
LABELS = {  # of unpaired rows
    **dict.fromkeys(("true", "1", "up", "desirable"), "desirable"),
    **dict.fromkeys(("false", "0", "-1", "down", "undesirable"), "undesirable"),
}
PANDALM = {"0": "tie", "1": "first", "2": "second"}  # what the columns annotator1, annotator2, ... hold


@dataclass(frozen=True)
class Preference:
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    label: float = 1.0  # probability that chosen is the better answer
    margin: float = 0.0  # difference of the scores, where the data has scores
    weight: float = 1.0
    tools: list[Any] | None = None
    sign: int = 0  # of an unpaired row: +1 its answer is desirable, -1 undesirable; `rejected` is the same answer

    @cached_property
    def id(self) -> str:
        """16 hex digits of a hash of the content."""
        content = [self.prompt, _answer(self.chosen), self.sign or _answer(self.rejected)]
        return _digest([*content, self.tools] if self.tools else content)

    @cached_property
    def swapped_id(self) -> str:
        """The id of the pair that prefers the other answer, or of the unpaired row with the other label."""
        return replace(self, chosen=self.rejected, rejected=self.chosen, sign=-self.sign).id

    @cached_property
    def prompt_text(self) -> str:
        return to_text(self.prompt)

    @cached_property
    def hashed_prompt(self) -> int:
        return prompt_hash(self.prompt_text)


MaybePreference = Preference | RejectedRow


@dataclass(frozen=True)
class RowLayout:
    """How a row becomes preferences. The last three are the keys of `prepare` with these names."""

    shape: str
    columns: Mapping[str, str] = field(default_factory=dict)  # our name: the file's
    votes: Mapping[str, str] = field(default_factory=lambda: PANDALM)  # value: first, second or tie; desirable or not
    expand: str = "best_rest"
    min_margin: float = 0.0
    ties: str = "drop"


def prompt_hash(text: str) -> int:
    """Hash of the prompt with case and white space normalized. It decides the side of the split."""
    normalized = " ".join(text.lower().split())
    return int(hashlib.sha256(normalized.encode()).hexdigest()[:16], 16)


def is_held_out(hashed_prompt: int, eval_fraction: float) -> bool:
    """Depends on the prompt alone: more rows move no prompt to the other side."""
    return (hashed_prompt >> 16) / (1 << 48) < eval_fraction


def sample_rank(pair: str, seed: int) -> int:
    """The rank of a pair in the random order by which `prepare.max_pairs` takes a sample."""
    return int(hashlib.sha256(f"{seed} {pair}".encode()).hexdigest()[:16], 16)


def row_id_hash(value: Any) -> int:
    """Hash of the id that a row carries; 0 is reserved for rows without one."""
    return int(_digest(value), 16) or 1


def _digest(content: Any) -> str:
    text = json.dumps(content, default=str)  # a table may hold dates and decimals
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _answer(turns: list[Message]) -> Any:
    """A single turn of plain text is hashed as that text."""
    return turns[0]["content"] if len(turns) == 1 and turns[0].keys() == {"role", "content"} else turns
