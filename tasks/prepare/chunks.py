"""What a worker process of `prepare` does: from a chunk of raw rows to a shard of tokenized pairs.

A shard depends on its chunk alone, so the number and speed of the workers cannot change the result.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts.markup import shortened
from tasks.config.prepare import Prepare
from tasks.errors import UserError
from tasks.prepare.dedup import VALUES, minhash
from tasks.prepare.rows.contract import check_pair
from tasks.prepare.rows.messages import to_text, unread_keys
from tasks.prepare.rows.preference import HASH_RANGE, Preference, RowLayout, is_held_out, row_id_hash, sample_rank
from tasks.prepare.rows.row_shapes import to_preferences
from tasks.prepare.shards import write_shard
from tasks.prepare.templates import ChatTemplate
from tasks.prepare.tokenization import TokenizedPair, tokenize, truncate
from tasks.source.readers import Chunk, rows_in
from tasks.source.reject_reasons import QUARANTINED, RawRow, RejectedRow

EXAMPLES = 3  # for each reject reason
EXAMPLE_CHARACTERS = 240
# Facts about each pair that the decisions over all chunks need.
COLUMNS: dict[str, Any] = {
    "row": np.int64,
    **dict.fromkeys(("pair_id", "swapped_id", "prompt", "row_id", "rank"), np.uint64),
    "sign": np.int8,
    "notes": np.uint8,
    **dict.fromkeys(("prompt_tokens", "chosen_tokens", "rejected_tokens"), np.int32),
    **dict.fromkeys(("held_out", "merged", "truncated", "chosen_ends", "rejected_ends"), np.bool_),
}


@dataclass(frozen=True)
class RowSource:
    """One source of rows with its layout, as `prepare` reads it."""

    name: str
    layout: RowLayout
    weight: float
    share: float
    held_out: bool
    replaced: bool = False  # by sampled answers: only its held-out pairs stay
    sampled: float = 1.0  # share of the pairs to tokenize, the first by sample_rank: enough for prepare.max_pairs


class RawFile(NamedTuple):
    source: int  # index of its source
    path: Path
    name: str  # as the user knows it


class ChunkTask(NamedTuple):
    number: int
    file: RawFile
    chunk: Chunk


class Candidate(NamedTuple):
    """A pair on its way through the checks."""

    row_number: int
    row: RawRow
    pair: Preference


@dataclass
class ChunkResult:
    """Counts, rejected rows and facts about the pairs of a chunk; the pairs themselves are in the shard."""

    number: int
    file: RawFile
    start: int  # number of the chunk's first row
    rows: int = 0
    candidates: int = 0  # pairs in the rows, valid or not
    rejected: Counter = field(default_factory=Counter)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    quarantine: list[str] = field(default_factory=list)
    too_long: Counter = field(default_factory=Counter)  # pairs left out, by the max_tokens (doubled) that keeps them
    unread: Counter = field(default_factory=Counter)  # messages by keys that nothing reads
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)

    def reject(self, row_number: int, rejected: RejectedRow, row: Any) -> None:
        content = row if rejected.content is None else rejected.content
        entry = {"file": self.file.name, "row": row_number, "violation": rejected.name, "reason": str(rejected)}
        self.rejected[rejected.name] += 1
        if self.rejected[rejected.name] <= EXAMPLES:
            example = {**entry, "content": shortened(to_json(content), EXAMPLE_CHARACTERS)}
            self.examples.setdefault(rejected.name, []).append(example)
        if rejected.name in QUARANTINED:
            self.quarantine.append(to_json({**entry, "content": content}))


def to_json(content: Any) -> str:
    """JSON that can be written to a file whatever the content holds."""
    return json.dumps(content, ensure_ascii=False, default=str).encode(errors="replace").decode()


@dataclass(frozen=True)
class ChunkWorker:
    """Processes chunks. It holds what all chunks share."""

    template: ChatTemplate
    sources: list[RowSource]
    params: Prepare
    shards: Path
    excluded: frozenset[str] = frozenset()  # ids of pairs to leave out

    def __call__(self, task: ChunkTask) -> ChunkResult:
        result = ChunkResult(task.number, task.file, task.chunk.start)
        valid = self._validate(list(self._read(task.chunk, result)), result)
        self._write(list(self._tokenize(valid, result)), result)
        return result

    def _read(self, chunk: Chunk, result: ChunkResult) -> Iterator[Candidate]:
        layout = self.sources[result.file.source].layout
        for number, row in rows_in(chunk):
            result.rows += 1
            if isinstance(row, RejectedRow):
                result.candidates += 1
                result.reject(number, row, None)
                continue
            result.unread.update(unread_keys(row))
            for pair in to_preferences(row, layout):
                result.candidates += 1
                if isinstance(pair, RejectedRow):
                    result.reject(number, pair, row)
                else:
                    yield Candidate(number, row, pair)

    def _validate(self, candidates: list[Candidate], result: ChunkResult) -> list[Candidate]:
        """The candidates that fulfil the data contract, and of them the share of their source."""
        source, valid = self.sources[result.file.source], []
        for candidate in candidates:
            rejected = check_pair(candidate.pair, self.params.max_characters)
            if rejected is None and candidate.pair.id in self.excluded:
                rejected = RejectedRow("excluded")
            if rejected is None and not self._is_sampled(source, candidate.pair):
                rejected = RejectedRow("not_sampled")
            if rejected is None:
                valid.append(candidate)
            else:
                result.reject(candidate.row_number, rejected, candidate.row)
        return valid

    def _is_sampled(self, source: RowSource, pair: Preference) -> bool:
        in_share = source.share == 1.0 or int(pair.id, 16) < source.share * HASH_RANGE
        rank = sample_rank(pair.id, self.params.seed) if source.sampled < 1.0 else 0
        replaced = source.replaced and not self._is_held_out(source, pair)
        return in_share and rank < source.sampled * HASH_RANGE and not replaced

    def _is_held_out(self, source: RowSource, pair: Preference) -> bool:
        fraction = self.params.eval_fraction
        return source.held_out if fraction is None else is_held_out(pair.hashed_prompt, fraction)

    def _tokenize(self, candidates: list[Candidate], result: ChunkResult) -> Iterator[tuple[Candidate, TokenizedPair]]:
        tokenized = tokenize(self.template, [candidate.pair for candidate in candidates])
        for candidate, tokens in zip(candidates, tokenized, strict=True):
            if isinstance(tokens, TokenizedPair):
                length = tokens.length
                tokens = self._truncate(tokens, f"{result.file.name}: row {candidate.row_number}")
                if isinstance(tokens, RejectedRow):
                    result.too_long[_doubled(self.params.max_tokens, length)] += 1
            if isinstance(tokens, RejectedRow):
                result.reject(candidate.row_number, tokens, candidate.row)
            else:
                yield candidate, tokens

    def _truncate(self, tokens: TokenizedPair, row: str) -> TokenizedPair | RejectedRow:
        limit, policy = self.params.max_tokens, self.params.over_length
        if tokens.length > limit and policy == "fail":
            raise UserError(
                f"{row} has {tokens.length} tokens, above prepare.max_tokens {limit}. Raise it, or set "
                "prepare.over_length to drop, truncate_prompt or truncate_response."
            )
        return truncate(tokens, limit, policy, self.template.tokenizer.bos_token_id)

    def _write(self, pairs: list[tuple[Candidate, TokenizedPair]], result: ChunkResult) -> None:
        """The pairs to a shard, the facts about them to the result's columns."""
        source = self.sources[result.file.source]
        write_shard(self.shards / f"{result.number:06d}.arrow", [self._pair(source, *pair) for pair in pairs])
        facts = [self._facts(source, *pair) for pair in pairs]
        result.columns = {name: np.array([fact[name] for fact in facts], dtype=kind) for name, kind in COLUMNS.items()}
        compared = pairs if self.params.near_duplicates is not None else []
        result.columns["signature"] = _signatures(candidate.pair for candidate, _ in compared)

    def _facts(self, source: RowSource, candidate: Candidate, tokens: TokenizedPair) -> dict[str, Any]:
        pair, row_id = candidate.pair, candidate.row.get(source.layout.columns.get("id", ""))
        return {
            "row": candidate.row_number,
            "pair_id": int(pair.id, 16),
            "swapped_id": int(pair.swapped_id, 16),
            "prompt": pair.hashed_prompt,
            "row_id": 0 if row_id is None else row_id_hash(row_id),
            "rank": sample_rank(pair.id, self.params.seed) if self.params.max_pairs else 0,
            "sign": pair.sign,
            "notes": int(tokens.notes),
            "prompt_tokens": len(tokens.prompt_ids),
            "chosen_tokens": len(tokens.chosen_ids),
            "rejected_tokens": len(tokens.rejected_ids),
            "held_out": self._is_held_out(source, pair),
            "merged": tokens.merged,
            "truncated": tokens.truncated,
            "chosen_ends": tokens.chosen_ids[-1] in self.template.end_ids,
            "rejected_ends": tokens.rejected_ids[-1] in self.template.end_ids,
        }

    def _pair(self, source: RowSource, candidate: Candidate, tokens: TokenizedPair) -> dict[str, Any]:
        if not self.params.apply_loss_mask:  # the loss covers every token but the first, which nothing predicts
            prompt_mask = [0] + [1] * (len(tokens.prompt_ids) - 1)
            chosen_mask, rejected_mask = [1] * len(tokens.chosen_ids), [1] * len(tokens.rejected_ids)
            tokens = replace(tokens, prompt_mask=prompt_mask, chosen_mask=chosen_mask, rejected_mask=rejected_mask)
        return pair_row(candidate.pair, tokens, source.name, source.weight)


def pair_row(pair: Preference, tokens: TokenizedPair, source: str, weight: float) -> dict[str, Any]:
    """A row of data/pairs, without the shared prefix."""
    return {
        "id": pair.id,
        "prompt": pair.prompt_text,
        "prompt_ids": tokens.prompt_ids,
        "prompt_mask": tokens.prompt_mask,
        "chosen_ids": tokens.chosen_ids,
        "chosen_mask": tokens.chosen_mask,
        "rejected_ids": tokens.rejected_ids,
        "rejected_mask": tokens.rejected_mask,
        "label": pair.label,
        "margin": pair.margin,
        "weight": pair.weight * weight,
        "source": source,
        "sign": pair.sign,
    }


def _doubled(limit: int, length: int) -> int:
    """The limit, doubled until it is `length` or more."""
    while limit < length:
        limit *= 2
    return limit


def _signatures(preferences: Iterable[Preference]) -> NDArray[np.uint32]:
    sides = ((p.prompt, p.chosen, p.rejected, p.tools) for p in preferences)
    texts = (" ".join([*map(to_text, turns), *(map(to_json, tools or ()))]) for *turns, tools in sides)
    return np.array([minhash(text) for text in texts], dtype=np.uint32).reshape(-1, VALUES)
