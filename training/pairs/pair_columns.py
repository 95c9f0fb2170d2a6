"""Facts about every pair of a set, as arrays: batches, checks and estimates need no Pair objects for them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from training.pairs.pair import Pair


@dataclass(frozen=True)
class PairColumns:
    """One value per pair. Token counts are those of the pair's parts."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    shared_prefix: np.ndarray
    label: np.ndarray
    margin: np.ndarray
    weight: np.ndarray
    sign: np.ndarray

    @cached_property
    def targets(self) -> np.ndarray:
        """Pair.target_count"""
        return self.chosen + self.rejected - self.shared_prefix

    @cached_property
    def lengths(self) -> np.ndarray:
        """Pair.__len__"""
        return self.prompt + self.targets

    @property
    def attended_tokens(self) -> np.ndarray:
        """Number of (query, key) pairs in the attention: its cost."""
        first, prefix = self.prompt + self.chosen, self.prompt + self.shared_prefix
        rest = self.rejected - self.shared_prefix
        return first * (first + 1) // 2 + prefix * rest + rest * (rest + 1) // 2

    def select(self, numbers: np.ndarray) -> "PairColumns":
        return PairColumns(*(getattr(self, name)[numbers] for name in self.__dataclass_fields__))


def columns_of(pairs: Sequence[Pair]) -> PairColumns:
    """The columns that a set of pairs stores, or those of a list of pairs."""
    stored: Any = getattr(pairs, "columns", None)
    if stored is not None:
        return stored
    counts = [(len(p.prompt_ids), len(p.chosen_ids), len(p.rejected_ids), p.shared_prefix) for p in pairs]
    values = [(pair.label, pair.margin, pair.weight, pair.sign) for pair in pairs]
    return PairColumns(
        *np.array(counts, dtype=np.int64).reshape(-1, 4).T, *np.array(values, dtype=np.float64).reshape(-1, 4).T
    )


class OneAnswer(Sequence[Pair]):
    """Unpaired rows with one answer, their own (chosen) or the mismatched one (rejected), as both sides of a pair.

    A prefix that both sides share is computed once, so the second side costs a single token.
    """

    def __init__(self, pairs: Sequence[Pair], side: str) -> None:
        self.pairs, self.side = pairs, side

    def __len__(self) -> int:
        return len(self.pairs)

    @overload
    def __getitem__(self, number: int) -> Pair: ...
    @overload
    def __getitem__(self, number: slice) -> list[Pair]: ...
    def __getitem__(self, number: int | slice) -> Pair | list[Pair]:
        pairs = self.pairs[number]
        return [self._pair(pair) for pair in pairs] if isinstance(pairs, Sequence) else self._pair(pairs)

    def _pair(self, pair: Pair) -> Pair:
        names = ("{}_ids", "{}_mask", "ref_{}_logps")
        values = [(name, getattr(pair, name.format(self.side))) for name in names]
        return replace(pair, **{name.format(side): value for name, value in values for side in ("chosen", "rejected")})

    @cached_property
    def columns(self) -> PairColumns:
        columns = columns_of(self.pairs)
        tokens = getattr(columns, self.side)
        return replace(columns, chosen=tokens, rejected=tokens, shared_prefix=np.maximum(tokens - 1, 0))


def shortest(pairs: Sequence[Pair]) -> Pair:
    return pairs[int(columns_of(pairs).lengths.argmin())]


def longest(pairs: Sequence[Pair]) -> Pair:
    return pairs[int(columns_of(pairs).lengths.argmax())]
