"""What a policy makes of each pair: implied rewards, and how far it moved from the reference.

The forward passes come first, in rows that any process may compute (`row_values`); the metrics read their values.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from training import loop
from training.engine import is_split, most
from training.logps import row_logps
from training.model import best_device
from training.objective import Objective
from training.outputs import PairValues
from training.packing import Pair, Row, build_row

Values = np.ndarray  # (3, response tokens) of one pair: log-probability, entropy, collision; chosen before rejected


@torch.no_grad()
def row_values(
    scorer: nn.Module, pairs: Sequence[Pair], rows: Sequence[Sequence[int]], device: torch.device
) -> list[Values]:
    """Of each pair, computed in the given rows of pair numbers; every pair is in one of them.

    Ranks that share one copy of the model make as many passes each: one with fewer rows repeats its last.
    """
    found: dict[int, Values] = {}
    passes = most(len(rows)) if is_split(scorer) else len(rows)
    for members in [*rows, *[rows[-1]] * (passes - len(rows))]:
        tokens = row_logps(scorer, build_row(pairs, members).to(device))
        values = torch.stack([tokens.logps, tokens.entropy, tokens.collision]).float().cpu().numpy()
        ends = np.cumsum([len(pairs[number].chosen) + len(pairs[number].rejected) for number in members])
        found |= dict(zip(members, np.split(values, ends[:-1], axis=1), strict=True))
    return [found[number] for number in range(len(pairs))]


class Stored(nn.Module):
    """Stands in for a scorer with values that were computed before."""

    def __init__(self, values: Sequence[Values]) -> None:
        super().__init__()
        self.values = values

    def forward(self, row: Row) -> tuple[Tensor, ...]:
        values = torch.from_numpy(np.concatenate([self.values[number] for number in row.pairs], axis=1))
        return tuple(values.to(row.input_ids.device))


def pair_values(
    scorer: nn.Module, objective: Objective, pairs: Sequence[Pair], row_tokens: int, device: torch.device
) -> tuple[dict[str, float], list[PairValues]]:
    """The means over all pairs, as in training, and the values of each pair in their order. A collective."""
    found: dict[int, PairValues] = {}

    def keep(row: Row, values: dict[str, Tensor]) -> None:
        kl = values.get("kl", torch.zeros(len(row.pairs)))
        columns = values["rewards/chosen"], values["rewards/rejected"], *row.sums(row.counts), kl
        for number, won, lost, first, second, drift in zip(row.pairs, *(c.tolist() for c in columns), strict=True):
            found[number] = PairValues(
                id=pairs[number].id,
                chosen_reward=won,
                rejected_reward=lost,
                chosen_tokens=int(first),
                rejected_tokens=int(second),
                kl=drift,
            )

    means = loop.evaluate(scorer, objective, pairs, row_tokens, device, each=keep)
    if dist.is_initialized():
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        found = {number: value for part in everywhere for number, value in part.items()}
    return means, [found[number] for number in range(len(pairs))]


def stored_pair_values(
    values: Sequence[Values], objective: Objective, pairs: Sequence[Pair], row_tokens: int
) -> tuple[dict[str, float], list[PairValues]]:
    """`pair_values` of what `row_values` gave."""
    device = best_device() if dist.is_initialized() else torch.device("cpu")  # NCCL sums on GPUs alone
    return pair_values(Stored(values), objective, pairs, row_tokens, device)
