"""Build and pin the rows of the next step on another thread while the device computes the current one."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from training.objectives import batches
from training.objectives.packing import PackedRow, Pair, build_row
from training.objectives.pair_columns import columns_of


@dataclass(frozen=True)
class StepBatch:
    """A rank's part of a step's global batch."""

    step: int  # from 0
    pair_numbers: list[int]  # of the global batch
    weight: float  # sum of the weights of the global batch's pairs
    tokens: int  # to compute for the global batch, and of these:
    targets: int  # tokens to predict
    attended_tokens: int  # sum over all tokens of those that each attends to
    rows: list[PackedRow]  # this rank's rows


class StepLoader:
    """The batches of a run from any step on; each depends only on its step number."""

    def __init__(
        self, pairs: Sequence[Pair], hidden_size: int, global_batch_size: int, row_tokens: int, seed: int
    ) -> None:
        self.pairs, self.batch_size, self.row_tokens, self.seed = pairs, global_batch_size, row_tokens, seed
        self.columns = columns_of(pairs)
        self.costs = batches.pair_costs(pairs, hidden_size)

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
        numbers = batches.step_pairs(step, len(self.pairs), self.batch_size, self.seed)
        assigned = batches.rank_rows(numbers, self.columns.lengths, self.costs, self.row_tokens, rank, world)
        rows = [build_row(self.pairs, *row) for row in assigned]
        if device.type == "cuda":
            rows = [row.pinned() for row in rows]
        batch = self.columns.select(np.asarray(numbers))
        tokens, targets, attended = (
            int(values.sum()) for values in (batch.lengths, batch.targets, batch.attended_tokens)
        )
        return StepBatch(step, numbers, sum(batch.weight.tolist()), tokens, targets, attended, rows)
