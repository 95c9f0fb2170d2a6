"""Values that a loss takes from the whole global batch: AOT's sorted ratios, beta-DPO's beta and filter, KTO's KL.

An extra forward pass without gradients collects the log-probabilities of all pairs from all ranks, so the result does
not depend on how the pairs were packed or on the number of ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.distributed.data_parallel import sum_over_groups
from training.objectives.losses import OrderStatistics, PairLogps, mismatched_kl, order_statistics
from training.objectives.metrics import pair_logps
from training.objectives.objective import Objective
from training.pairs.packing import PackedRow
from training.scoring.logps import row_logps

MIN_BETA_FACTOR = 0.01  # beta-DPO's beta is at least this fraction of the configured beta
MIN_SPREAD = 1e-3  # the filter ignores smaller differences between reward margins: they are rounding
COLLECTED = (  # of each pair
    *("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps"),
    *("chosen_mean_logps", "rejected_mean_logps", "chosen_tokens", "rejected_tokens"),
)


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The pairs of a global batch, in the order of the step's pair indices."""

    pairs: PairLogps
    weight: Tensor  # (pairs,)
    row_positions: list[Tensor]  # for each row of this rank, the positions of its pairs in the batch


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """beta-DPO's values for a global batch."""

    beta: Tensor  # ()
    filter_weight: Tensor  # (pairs,) 0 for dropped pairs; the weighted mean over the batch is 1
    running: Tensor  # (2,) running mean and standard deviation of the reward margins, including this batch


def gather(
    policy: nn.Module,
    objective: Objective,
    rows: Iterable[PackedRow],
    pair_indices: Sequence[int],
    device: torch.device,
) -> GlobalBatch:
    """Collect the log-probabilities of all pairs from all ranks. A collective."""
    position = {index: number for number, index in enumerate(pair_indices)}
    table = torch.zeros(len(COLLECTED) + 1, len(pair_indices), dtype=torch.float64, device=device)
    row_positions = []
    for row in rows:
        row_positions.append(torch.tensor([position[index] for index in row.pair_indices], device=device))
        logps = pair_logps(row, row_logps(policy, row), objective)
        columns = torch.stack([*(getattr(logps, name) for name in COLLECTED), row.weight])
        table[:, row_positions[-1]] += columns.double() * float(not row.is_filler)
    sum_over_groups(table)
    pairs = PairLogps(**dict(zip(COLLECTED, table[:-1], strict=True)))
    return GlobalBatch(pairs=pairs, weight=table[-1], row_positions=row_positions)


def calibrate(batch: GlobalBatch, objective: Objective, running: Tensor, seed: int) -> Calibration:
    """beta-DPO, arXiv 2407.08639: beta_0 (1 + alpha (M - M_0)), M the batch's mean reward margin, M_0 its running mean.

    As in the authors' code, the running values start at 0 and include the batch before they are used. The filter
    samples pairs without replacement, weighted by a Gaussian around M_0: it keeps the pairs with the largest sum of
    log-weight and Gumbel noise. The noise depends on the seed and is drawn on the CPU, so that all ranks and a resumed
    run keep the same pairs.
    """
    options, beta, alpha = objective.options, objective.beta, float(objective.options["beta_alpha"])
    momentum, drop_fraction = float(options.get("beta_momentum", 0.9)), float(options.get("beta_filter", 0.0))
    margins = beta * (batch.pairs.chosen_ratio - batch.pairs.rejected_ratio)
    running = momentum * running + (1 - momentum) * torch.stack([margins.mean(), margins.std(correction=0)])
    center, spread = running
    noise = torch.rand(len(margins), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    gumbel = -torch.log(-torch.log(noise.clamp(1e-12, 1 - 1e-12))).to(margins.device)
    log_weight = -0.5 * ((margins - center) / (spread + MIN_SPREAD)) ** 2
    kept = (log_weight + gumbel).topk(max(1, round(len(margins) * (1 - drop_fraction)))).indices
    is_kept = torch.zeros_like(margins).index_fill(0, kept, 1.0)
    return Calibration(
        beta=beta * (1 + alpha * (margins[kept].mean() - center)).clamp(min=MIN_BETA_FACTOR),
        filter_weight=is_kept * batch.weight.sum() / (is_kept * batch.weight).sum(),
        running=running,
    )


@torch.no_grad()
def batch_kl(
    policy: nn.Module,
    objective: Objective,
    rows: Iterable[PackedRow],
    pair_indices: Sequence[int],
    device: torch.device,
) -> dict[str, Any]:
    """KTO's KL of unpaired rows as an argument of `pair_logps`, the same for each row. A collective."""
    batch = gather(policy, objective, rows, pair_indices, device)
    return {"batch_kl": mismatched_kl(batch.pairs.rejected_ratio).float()}


@torch.no_grad()
def global_batch_values(
    policy: nn.Module,
    objective: Objective,
    rows: Iterable[PackedRow],
    pair_indices: Sequence[int],
    device: torch.device,
    *,
    running: Tensor | None = None,
    seed: int = 0,
) -> tuple[dict[int, dict[str, Any]], Tensor | None]:
    """By row number the arguments of `pair_logps` that depend on the global batch, and beta-DPO's new running values.

    Without running values (held-out pairs), beta is the configured one and the filter drops nothing.
    """
    adapts_beta = objective.adapts_beta and running is not None
    if not (objective.sorts_batch or adapts_beta):
        return {}, running
    batch = gather(policy, objective, rows, pair_indices, device)
    contexts: dict[int, dict[str, Any]] = {number: {} for number in range(len(batch.row_positions))}
    if objective.sorts_batch:
        statistics = vars(order_statistics(batch.pairs))
        for number, positions in enumerate(batch.row_positions):
            own = {name: values[positions].float() for name, values in statistics.items()}
            contexts[number]["order_statistics"] = OrderStatistics(**own)
    if adapts_beta and running is not None:
        calibration = calibrate(batch, objective, running, seed)
        running = calibration.running
        for number, positions in enumerate(batch.row_positions):
            filter_weight = calibration.filter_weight[positions].float()
            contexts[number] |= {"batch_beta": calibration.beta.float(), "filter_weight": filter_weight}
    return contexts, running
