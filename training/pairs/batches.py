"""The pairs of each step, the rows of each rank, and the learning rate: pure functions, so that a resume is exact."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from training.pairs.pair import Pair, pack
from training.pairs.pair_columns import columns_of

if TYPE_CHECKING:
    from torch import Tensor

PACKING_GROUP = 512  # pairs that are packed together, so that packing many pairs stays fast


def total_steps(pairs: int, global_batch_size: int, epochs: int, max_steps: int | None) -> int:
    steps = steps_per_epoch(pairs, global_batch_size) * epochs
    return min(steps, max_steps) if max_steps else steps


def steps_per_epoch(pairs: int, global_batch_size: int) -> int:
    return math.ceil(pairs / global_batch_size)


def step_pairs(step: int, pairs: int, global_batch_size: int, seed: int) -> list[int]:
    """Indices of the pairs of a step (from 0). Each epoch has another order; its last step may have fewer pairs."""
    epoch, within = divmod(step, steps_per_epoch(pairs, global_batch_size))
    return _epoch_order(pairs, seed, epoch)[within * global_batch_size : (within + 1) * global_batch_size].tolist()


@lru_cache(maxsize=2)
def _epoch_order(pairs: int, seed: int, epoch: int) -> "Tensor":
    import torch  # which the driver of a training does not need

    return torch.randperm(pairs, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def pair_costs(pairs: Sequence[Pair], hidden_size: int) -> np.ndarray:
    """Cost of each pair, in tokens: attention to 6 hidden_size tokens costs as much as a token's matrix products."""
    columns = columns_of(pairs)
    return columns.lengths + columns.attended_tokens / (6 * hidden_size)


def rank_rows(
    indices: Sequence[int], all_lengths: np.ndarray, all_costs: np.ndarray, row_tokens: int, rank: int, world: int
) -> list[tuple[list[int], bool]]:
    """The rows of this rank in a step: pair indices, and whether the row is filler.

    Rows have similar costs, and each rank gets equally many, since each pass is a collective under ZeRO. With fewer
    pairs than ranks, a rank without pairs repeats the shortest pair of the step as a filler row.
    """
    costs, lengths = all_costs[indices].tolist(), all_lengths[indices].tolist()
    packed = sorted(pack(costs, lengths, row_tokens, multiple=world), key=lambda row: -sum(costs[n] for n in row))
    rows = [[indices[item] for item in row] for row in packed]
    filler = [indices[lengths.index(min(lengths))]]
    own = []
    for number in range(len(rows) // world):
        # In alternating order, so that no rank gets the costliest row every time.
        row = rows[number * world + (rank if number % 2 == 0 else world - 1 - rank)]
        own.append((row, False) if row else (filler, True))
    return own


def rank_rows_of_all(
    lengths: np.ndarray, row_tokens: int, rank: int, world: int
) -> Iterator[list[tuple[list[int], bool]]]:
    """The rows of this rank, as `rank_rows` gives them, for each group of consecutive pairs."""
    for start in range(0, len(lengths), PACKING_GROUP):
        indices = range(start, min(start + PACKING_GROUP, len(lengths)))
        yield rank_rows(indices, lengths, lengths, row_tokens, rank, world)


def learning_rate(step: int, steps: int, peak: float, warmup_fraction: float, schedule: str) -> float:
    """Of the update of `step` (from 0): linear warm-up, then the schedule, which reaches 0 after the last step."""
    warmup = math.ceil(steps * warmup_fraction)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    factors = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return peak * factors[schedule]
