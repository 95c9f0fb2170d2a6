"""A step's rows, built and pinned on another thread while the device computes the step before."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from training import batches
from training.packing import Pair, Row, build_row


@dataclass(frozen=True)
class Step:
    number: int  # from 0
    numbers: list[int]  # the pairs of the global batch
    weight: float  # the sum of their weights
    tokens: int  # to compute, of all of them
    rows: list[tuple[Row, bool]]  # this rank's rows, and whether they count


class Feed:
    """The steps of a run from any first step on; each is a function of its number alone."""

    def __init__(
        self, pairs: Sequence[Pair], hidden_size: int, global_batch_size: int, row_tokens: int, seed: int
    ) -> None:
        self.pairs, self.batch, self.row_tokens, self.seed = pairs, global_batch_size, row_tokens, seed
        self.lengths = [len(pair) for pair in pairs]
        self.costs = batches.pair_costs(pairs, hidden_size)

    def steps(self, first: int, last: int, rank: int, world: int, device: torch.device) -> Iterator[Step]:
        with ThreadPoolExecutor(1) as ahead:
            next_one = ahead.submit(self._step, first, rank, world, device) if first < last else None
            for number in range(first, last):
                assert next_one is not None
                step = next_one.result()
                next_one = ahead.submit(self._step, number + 1, rank, world, device) if number + 1 < last else None
                yield step

    def _step(self, number: int, rank: int, world: int, device: torch.device) -> Step:
        numbers = batches.step_pairs(number, len(self.pairs), self.batch, self.seed)
        dealt = batches.rank_rows(numbers, self.lengths, self.costs, self.row_tokens, rank, world)
        rows = [(build_row(self.pairs, members), counts) for members, counts in dealt]
        if device.type == "cuda":
            rows = [(row.pinned(), counts) for row, counts in rows]
        weight, tokens = sum(self.pairs[n].weight for n in numbers), sum(self.lengths[n] for n in numbers)
        return Step(number, numbers, weight, tokens, rows)
