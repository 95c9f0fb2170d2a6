"""Values that a loss takes from the whole global batch: AOT's sorted ratios and KTO's KL.

An extra forward pass without gradients collects the log-probabilities of all pairs from all ranks, so the result does
not depend on how the pairs were packed or on the number of ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from training.distributed.data_parallel import sum_over_groups
from training.objectives.losses.aot import order_statistics
from training.objectives.metrics import pair_logps
from training.objectives.objective import Objective
from training.objectives.pair_logps import OrderStatistics, PairLogps, kl_estimate
from training.pairs.packing import PackedRow
from training.scoring.logps import row_logps

COLLECTED = (  # of each pair
    *("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps"),
    *("chosen_mean_logps", "rejected_mean_logps", "chosen_tokens", "rejected_tokens"),
)


def gather(
    policy: nn.Module,
    objective: Objective,
    rows: Iterable[PackedRow],
    pair_indices: Sequence[int],
    device: torch.device,
) -> tuple[PairLogps, list[Tensor]]:
    """The log-probabilities of all pairs from all ranks, and for each row of this rank its pairs' positions among them.

    A collective.
    """
    position = {index: number for number, index in enumerate(pair_indices)}
    table = torch.zeros(len(COLLECTED), len(pair_indices), dtype=torch.float64, device=device)
    row_positions = []
    for row in rows:
        row_positions.append(torch.tensor([position[index] for index in row.pair_indices], device=device))
        logps = pair_logps(row, row_logps(policy, row), objective)
        columns = torch.stack([getattr(logps, name) for name in COLLECTED])
        table[:, row_positions[-1]] += columns.double() * float(not row.is_filler)
    sum_over_groups(table)
    return PairLogps(**dict(zip(COLLECTED, table, strict=True))), row_positions


@torch.no_grad()
def batch_kl(
    policy: nn.Module,
    objective: Objective,
    rows: Iterable[PackedRow],
    pair_indices: Sequence[int],
    device: torch.device,
) -> dict[str, Any]:
    """KTO's KL of unpaired rows as an argument of `pair_logps`, the same for each row. A collective."""
    pairs, _ = gather(policy, objective, rows, pair_indices, device)
    return {"batch_kl": kl_estimate(pairs.rejected_ratio).float()}


@torch.no_grad()
def global_batch_values(
    policy: nn.Module,
    objective: Objective,
    rows: Iterable[PackedRow],
    pair_indices: Sequence[int],
    device: torch.device,
) -> dict[int, dict[str, Any]]:
    """By row number the arguments of `pair_logps` that depend on the global batch. A collective."""
    if not objective.sorts_batch:
        return {}
    pairs, row_positions = gather(policy, objective, rows, pair_indices, device)
    statistics = vars(order_statistics(pairs))
    values = {}
    for number, positions in enumerate(row_positions):
        own = {name: column[positions].float() for name, column in statistics.items()}
        values[number] = {"order_statistics": OrderStatistics(**own)}
    return values
