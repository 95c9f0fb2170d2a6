"""Build and pin the rows of the next step on another thread while the device computes the current one."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from training.pairs import batches
from training.pairs.packing import PackedRow, build_row
from training.pairs.pair import Pair
from training.pairs.pair_columns import OneAnswer, columns_of


@dataclass(frozen=True)
class StepBatch:
    """A rank's part of a step's global batch."""

    step: int  # from 0
    pair_numbers: list[int]  # of the global batch
    weight: float  # sum of the weights of the global batch's pairs
    tokens: int  # of the global batch that are computed
    targets: int  # of the global batch that are predicted
    attended_tokens: int  # sum over the computed tokens of the number of tokens that each attends to
    rows: list[PackedRow]  # this rank's rows
    kl_rows: list[PackedRow] = field(default_factory=list)  # the same prompts with answers to other prompts (KTO)


class _Rows:
    """Pairs, packed into the rows of a step."""

    def __init__(self, pairs: Sequence[Pair], hidden_size: int) -> None:
        self.pairs, self.columns, self.costs = pairs, columns_of(pairs), batches.pair_costs(pairs, hidden_size)

    def build(
        self, numbers: list[int], row_tokens: int, rank: int, world: int, device: torch.device
    ) -> list[PackedRow]:
        assigned = batches.rank_rows(numbers, self.columns.lengths, self.costs, row_tokens, rank, world)
        rows = [build_row(self.pairs, *row) for row in assigned]
        return [row.pinned() for row in rows] if device.type == "cuda" else rows


class StepLoader:
    """The batches of a run from any step on; each depends only on its step number."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        hidden_size: int,
        global_batch_size: int,
        row_tokens: int,
        seed: int,
        reads_kl: bool = False,
    ) -> None:
        self.batch_size, self.row_tokens, self.seed = global_batch_size, row_tokens, seed
        unpaired = bool(columns_of(pairs).sign.any())
        self.own = _Rows(OneAnswer(pairs, "chosen") if unpaired else pairs, hidden_size)
        self.kl_rows = _Rows(OneAnswer(pairs, "rejected"), hidden_size) if unpaired and reads_kl else None

    def steps(self, first: int, last: int, rank: int, world: int, device: torch.device) -> Iterator[StepBatch]:
        """The batches of the steps from `first` up to, not including, `last`."""
        with ThreadPoolExecutor(1) as thread:
            upcoming = thread.submit(self._load, first, rank, world, device) if first < last else None
            for step in range(first, last):
                assert upcoming is not None
                batch = upcoming.result()
                upcoming = thread.submit(self._load, step + 1, rank, world, device) if step + 1 < last else None
                yield batch

    def _load(self, step: int, rank: int, world: int, device: torch.device) -> StepBatch:
        numbers = batches.step_pairs(step, len(self.own.pairs), self.batch_size, self.seed)
        where = (self.row_tokens, rank, world, device)
        rows = self.own.build(numbers, *where)
        kl_rows = self.kl_rows.build(numbers, *where) if self.kl_rows else []
        batch = self.own.columns.select(np.asarray(numbers))
        tokens, targets, attended = (
            int(values.sum()) for values in (batch.lengths, batch.targets, batch.attended_tokens)
        )
        return StepBatch(step, numbers, sum(batch.weight.tolist()), tokens, targets, attended, rows, kl_rows)
