"""Which pairs make up which step, and which rows of a step are whose: pure functions, so that a resume is exact."""

import math
from collections.abc import Sequence

import torch

from training.packing import Pair, pack


def total_steps(pairs: int, global_batch_size: int, epochs: int, max_steps: int | None) -> int:
    steps = steps_per_epoch(pairs, global_batch_size) * epochs
    return min(steps, max_steps) if max_steps else steps


def steps_per_epoch(pairs: int, global_batch_size: int) -> int:
    return math.ceil(pairs / global_batch_size)


def step_pairs(step: int, pairs: int, global_batch_size: int, seed: int) -> list[int]:
    """Numbers of the pairs of a step (from 0), in an order of its own for every epoch; an epoch's last may be short."""
    epoch, within = divmod(step, steps_per_epoch(pairs, global_batch_size))
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[within * global_batch_size : (within + 1) * global_batch_size].tolist()


def pair_costs(pairs: Sequence[Pair], hidden_size: int) -> list[float]:
    """What a pair costs in tokens: attending to 6 hidden_size tokens costs as much as a token's matrix products."""
    return [len(pair) + pair.attended / (6 * hidden_size) for pair in pairs]


def rank_rows(
    numbers: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, rank: int, world: int
) -> list[tuple[list[int], bool]]:
    """This rank's rows of a step: (pair numbers, whether they count).

    Rows are packed even in cost, and every rank gets equally many, since each pass is a collective under ZeRO: no rank
    waits. A rank without work (fewer pairs than ranks) repeats the step's shortest pair as a row that does not count.
    """
    packed = pack([costs[n] for n in numbers], [lengths[n] for n in numbers], budget, multiple=world)
    rows = sorted(([numbers[item] for item in row] for row in packed), key=lambda row: -sum(costs[n] for n in row))
    filler = [min(numbers, key=lambda n: lengths[n])]
    mine = []
    for deal in range(len(rows) // world):
        # There and back again, so that one rank does not get the costlier row of every deal.
        row = rows[deal * world + (rank if deal % 2 == 0 else world - 1 - rank)]
        mine.append((row, True) if row else (filler, False))
    return mine


def learning_rate(step: int, steps: int, peak: float, warmup_fraction: float, schedule: str) -> float:
    """For the update of `step` (from 0): linear warm-up, then the schedule down to 0 after the last step."""
    warmup = math.ceil(steps * warmup_fraction)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    shapes = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return peak * shapes[schedule]
