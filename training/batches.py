"""Which pairs make up which step, and which rows of a step are whose: pure functions, so that a resume is exact."""

import math
from collections.abc import Sequence

import torch

from training.packing import pack


def total_steps(pairs: int, global_batch_size: int, epochs: int, max_steps: int | None) -> int:
    steps = math.ceil(pairs / global_batch_size) * epochs
    return min(steps, max_steps) if max_steps else steps


def step_pairs(step: int, pairs: int, global_batch_size: int, seed: int) -> list[int]:
    """Numbers of the pairs of a step (from 0), in an order of its own for every epoch; an epoch's last may be short."""
    steps_per_epoch = math.ceil(pairs / global_batch_size)
    epoch, within = divmod(step, steps_per_epoch)
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[within * global_batch_size : (within + 1) * global_batch_size].tolist()


def rank_rows(
    numbers: Sequence[int], lengths: Sequence[int], budget: int, rank: int, world: int
) -> list[tuple[list[int], bool]]:
    """This rank's rows of a step: (pair numbers, whether they count).

    Every rank gets equally many rows, since each pass is a collective under ZeRO; the costliest go round first. A
    rank without work repeats the step's shortest pair as a row that does not count.
    """
    rows = [[numbers[item] for item in row] for row in pack([lengths[n] for n in numbers], budget)]
    rows.sort(key=lambda row: -sum(lengths[n] for n in row))
    filler = [min(numbers, key=lambda n: lengths[n])]
    deals = math.ceil(len(rows) / world)
    mine = []
    for deal in range(deals):
        # There and back again, so that one rank does not get the longer row of every deal.
        place = deal * world + (rank if deal % 2 == 0 else world - 1 - rank)
        mine.append((rows[place], True) if place < len(rows) else (filler, False))
    return mine


def learning_rate(step: int, steps: int, peak: float, warmup_fraction: float, schedule: str) -> float:
    """For the update of `step` (from 0): linear warm-up, then the schedule down to 0 after the last step."""
    warmup = math.ceil(steps * warmup_fraction)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    shapes = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return peak * shapes[schedule]
