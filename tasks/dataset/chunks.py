"""What a worker of `prepare` does with a chunk of rows: from lines to tokenised pairs in a shard of their own.

A shard depends on its chunk alone, so neither the number of workers nor their speed can be seen in the result.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.dataset.contract import check_pairs
from tasks.dataset.conversations import Choices, Conversation, Row
from tasks.dataset.formats import rename, to_conversations
from tasks.dataset.identity import SPACE, identity_of, is_held_out, key_of, mirror_of, prompt_hash
from tasks.dataset.lengths import excess, fit
from tasks.dataset.messages import text_of
from tasks.dataset.minhash import VALUES, signature
from tasks.dataset.readers import Chunk, rows_in
from tasks.dataset.shards import write_shard
from tasks.dataset.templates import Template, Tokens, tokenise
from tasks.dataset.violations import BAD, BadRow
from tasks.errors import UserError
from tasks.params import Prepare

EXAMPLES = 3  # of each violation
SHORT = 240  # characters of an example
# What the whole must know of each pair, besides its shard.
COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("row",), np.int64),
    **dict.fromkeys(("identity", "mirror", "prompt", "key"), np.uint64),
    **dict.fromkeys(("prompt_tokens", "chosen_tokens", "rejected_tokens"), np.int32),
    **dict.fromkeys(("held", "merged", "truncated", "chosen_ends", "rejected_ends"), np.bool_),
}


@dataclass(frozen=True)
class Origin:
    """A source of rows as `prepare` sees it."""

    name: str
    shape: str
    columns: dict[str, str]
    weight: float
    share: float
    held_out: bool


@dataclass(frozen=True)
class Task:
    """One chunk of one file."""

    number: int
    origin: int
    file: int
    called: str  # what the user calls the file
    chunk: Chunk


@dataclass
class Outcome:
    """What became of a chunk."""

    number: int
    origin: int
    called: str
    place: tuple[int, int] = (0, 0)  # the file, and the number of its first row
    rows: int = 0
    candidates: int = 0  # pairs that the rows spoke of, good or bad
    counts: Counter = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    quarantine: list[str] = field(default_factory=list)
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)

    def leave_out(self, number: int, bad: BadRow, row: Any) -> None:
        content = row if bad.content is None else bad.content
        entry = {"file": self.called, "row": number, "violation": bad.name, "reason": str(bad)}
        self.counts[bad.name] += 1
        if self.counts[bad.name] <= EXAMPLES:
            self.examples.setdefault(bad.name, []).append({**entry, "content": as_line(content)[:SHORT]})
        if bad.name in BAD:
            self.quarantine.append(as_line({**entry, "content": content}))


def as_line(content: Any) -> str:
    """JSON that can be written whatever it holds."""
    return json.dumps(content, ensure_ascii=False, default=str).encode(errors="replace").decode()


@dataclass(frozen=True)
class Worker:
    """What every chunk is treated with."""

    template: Template
    origins: list[Origin]
    params: Prepare
    folder: Path  # of the shards

    def __call__(self, task: Task) -> Outcome:
        outcome = Outcome(task.number, task.origin, task.called, (task.file, task.chunk.start))
        kept = list(self._tokenised(self._sound(self._candidates(task, outcome), outcome), outcome))
        self._write(kept, outcome)
        return outcome

    def _candidates(self, task: Task, outcome: Outcome) -> Iterator[tuple[int, Row, Conversation]]:
        """(row number, row, pair) of each pair that the rows speak of."""
        origin, params = self.origins[task.origin], self.params
        choices = Choices(params.expand, params.min_margin, params.ties)
        for number, row in rows_in(task.chunk):
            outcome.rows += 1
            if isinstance(row, BadRow):
                outcome.candidates += 1
                outcome.leave_out(number, row, None)
                continue
            for one in to_conversations(rename(row, origin.columns), origin.shape, origin.columns, choices):
                outcome.candidates += 1
                if isinstance(one, BadRow):
                    outcome.leave_out(number, one, row)
                else:
                    yield number, row, one

    def _sound(self, candidates: Iterator[Any], outcome: Outcome) -> list[tuple[int, Row, Conversation]]:
        """Those that keep the contract, and of them the share of their source."""
        share, sound, pairs = self.origins[outcome.origin].share, [], list(candidates)
        checks = check_pairs([one for _, _, one in pairs], self.params.max_characters)
        for (number, row, one), bad in zip(pairs, checks, strict=True):
            if bad is None and share < 1.0 and int(identity_of(one), 16) >= share * SPACE:
                bad = BadRow("not_sampled")
            if bad is None:
                sound.append((number, row, one))
            else:
                outcome.leave_out(number, bad, row)
        return sound

    def _tokenised(self, sound: list[Any], outcome: Outcome) -> Iterator[tuple[int, Row, Conversation, Tokens]]:
        for (number, row, one), tokens in zip(sound, tokenise(self.template, [s[2] for s in sound]), strict=True):
            fitted = self._fit(tokens, outcome.called, number) if isinstance(tokens, Tokens) else tokens
            if isinstance(fitted, BadRow):
                outcome.leave_out(number, fitted, row)
            else:
                yield number, row, one, fitted

    def _fit(self, tokens: Tokens, called: str, number: int) -> Tokens | BadRow:
        most, policy = self.params.max_tokens, self.params.over_length
        over = excess(tokens, most)
        if over > 0 and policy == "fail":
            raise UserError(
                f"{called}: row {number} has {most + over} tokens, above prepare.max_tokens {most}. Raise it, or set "
                "prepare.over_length to drop, truncate_prompt or truncate_response."
            )
        return fit(tokens, most, policy, self.template.tokenizer.bos_token_id)

    def _write(self, kept: list[Any], outcome: Outcome) -> None:
        """The pairs as a shard, and what the whole must know of them as columns."""
        origin = self.origins[outcome.origin]
        texts = [text_of(one.prompt) for _, _, one, _ in kept]
        ids = [identity_of(one) for _, _, one, _ in kept]
        rows = [
            self._row(origin, i, t, one, tokens) for i, t, (_, _, one, tokens) in zip(ids, texts, kept, strict=True)
        ]
        write_shard(self.folder / f"{outcome.number:06d}.arrow", rows)
        facts = [self._facts(origin, i, t, *pair) for i, t, pair in zip(ids, texts, kept, strict=True)]
        outcome.columns = {name: np.array([f[name] for f in facts], dtype=kind) for name, kind in COLUMNS.items()}
        wanted = kept if self.params.near_duplicates is not None else []
        signatures = [
            signature(" ".join(map(text_of, (one.prompt, one.chosen, one.rejected)))) for _, _, one, _ in wanted
        ]
        outcome.columns["signature"] = np.array(signatures, dtype=np.uint32).reshape(-1, VALUES)

    def _facts(
        self, origin: Origin, identity: str, text: str, number: int, row: Row, one: Conversation, tokens: Tokens
    ) -> dict[str, Any]:
        hashed, fraction, key = prompt_hash(text), self.params.eval_fraction, row.get(origin.columns.get("id", ""))
        return {
            "row": number,
            "identity": int(identity, 16),
            "mirror": int(mirror_of(one), 16),
            "prompt": hashed,
            "key": 0 if key is None else key_of(key),
            "prompt_tokens": len(tokens.prompt),
            "chosen_tokens": len(tokens.chosen),
            "rejected_tokens": len(tokens.rejected),
            "held": origin.held_out if fraction is None else is_held_out(hashed, fraction),
            "merged": tokens.merged,
            "truncated": tokens.truncated,
            "chosen_ends": tokens.chosen[-1] in self.template.ends,
            "rejected_ends": tokens.rejected[-1] in self.template.ends,
        }

    def _row(self, origin: Origin, identity: str, text: str, one: Conversation, tokens: Tokens) -> dict[str, Any]:
        prompt_mask: list[int] = []
        chosen_mask, rejected_mask = tokens.chosen_mask, tokens.rejected_mask
        if not self.params.apply_loss_mask:  # every token counts but the first, which nothing predicts
            prompt_mask = [0] + [1] * (len(tokens.prompt) - 1)
            chosen_mask, rejected_mask = [1] * len(tokens.chosen), [1] * len(tokens.rejected)
        return {
            "id": identity,
            "prompt": text,
            "prompt_ids": tokens.prompt,
            "prompt_mask": prompt_mask,
            "chosen_ids": tokens.chosen,
            "chosen_mask": chosen_mask,
            "rejected_ids": tokens.rejected,
            "rejected_mask": rejected_mask,
            "label": one.label,
            "margin": one.margin,
            "weight": one.weight * origin.weight,
            "source": origin.name,
        }
