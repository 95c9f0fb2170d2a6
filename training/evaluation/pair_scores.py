"""Implied rewards of each pair under a policy, and its distance from the reference.

The forward passes come first, in rows that any process may compute (`score_rows`). The metrics then read their values.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.distributed.process_group import max_over_ranks
from training.evaluation.samples import PairValues
from training.models.loading import best_device
from training.models.sharded import is_sharded
from training.objectives.held_out import evaluate_pairs
from training.objectives.objective import Objective
from training.pairs.packing import PackedRow, build_row
from training.pairs.pair import Pair
from training.scoring.logps import row_logps

TokenValues = np.ndarray  # (3, response tokens) of a pair: log-probability, entropy, collision; chosen, then rejected


@torch.no_grad()
def score_rows(
    scorer: nn.Module, pairs: Sequence[Pair], rows: Sequence[Sequence[int]], device: torch.device
) -> list[TokenValues]:
    """The values of each pair, computed in `rows` of pair numbers, which together contain every pair.

    Ranks that share one copy of the model make equally many passes: a rank with fewer rows repeats its last.
    """
    by_number: dict[int, TokenValues] = {}
    passes = max_over_ranks(len(rows)) if is_sharded(scorer) else len(rows)
    for members in [*rows, *[rows[-1]] * (passes - len(rows))]:
        tokens = row_logps(scorer, build_row(pairs, members).to(device))
        values = torch.stack([tokens.logps, tokens.entropy, tokens.collision]).float().cpu().numpy()
        ends = np.cumsum([len(pairs[number].chosen_ids) + len(pairs[number].rejected_ids) for number in members])
        by_number |= dict(zip(members, np.split(values, ends[:-1], axis=1), strict=True))
    return [by_number[number] for number in range(len(pairs))]


class StoredScorer(nn.Module):
    """A scorer that returns values computed before."""

    def __init__(self, values: Sequence[TokenValues]) -> None:
        super().__init__()
        self.values = values

    def forward(self, row: PackedRow) -> tuple[Tensor, ...]:
        values = torch.from_numpy(np.concatenate([self.values[number] for number in row.pair_indices], axis=1))
        return tuple(values.to(row.input_ids.device))


def pair_values(
    scorer: nn.Module, objective: Objective, pairs: Sequence[Pair], row_tokens: int, device: torch.device
) -> tuple[dict[str, float], list[PairValues]]:
    """Means over all pairs, as in training, and the values of each pair in order. A collective."""
    by_number: dict[int, PairValues] = {}

    def keep(row: PackedRow, values: dict[str, Tensor]) -> None:
        kl = values.get("kl", torch.zeros(len(row.pair_indices)))
        columns = *compared_rewards(row, values, objective), *row.sums(row.loss_mask), kl, row.sign
        for number, chosen, rejected, chosen_tokens, rejected_tokens, drift, sign in zip(
            row.pair_indices, *(c.tolist() for c in columns), strict=True
        ):
            by_number[number] = PairValues(
                id=pairs[number].id,
                chosen_reward=chosen,
                rejected_reward=rejected,
                chosen_tokens=int(chosen_tokens),
                rejected_tokens=int(rejected_tokens),
                kl=drift,
                sign=int(sign),
            )

    means = evaluate_pairs(scorer, objective, pairs, row_tokens, device, on_row=keep)
    if dist.is_initialized():
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, by_number)
        by_number = {number: value for part in by_rank for number, value in part.items()}
    return means, [by_number[number] for number in range(len(pairs))]


def compared_rewards(row: PackedRow, values: dict[str, Tensor], objective: Objective) -> tuple[Tensor, Tensor]:
    """The rewards that should be higher and lower. An undesirable answer's own should be below the zero reward."""
    chosen, rejected = values["rewards/chosen"], values["rewards/rejected"]
    if not row.is_unpaired:
        return chosen, rejected
    zero = objective.beta * values.get("kl/mismatched", torch.zeros_like(chosen))
    return torch.where(row.sign > 0, chosen, zero), torch.where(row.sign > 0, zero, rejected)


def stored_pair_values(
    values: Sequence[TokenValues], objective: Objective, pairs: Sequence[Pair], row_tokens: int
) -> tuple[dict[str, float], list[PairValues]]:
    """`pair_values` from the output of `score_rows`."""
    device = best_device() if dist.is_initialized() else torch.device("cpu")  # NCCL reduces only on GPUs
    return pair_values(StoredScorer(values), objective, pairs, row_tokens, device)
