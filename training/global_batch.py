"""What a pair's loss reads of the whole global batch: its rank (AOT), and beta-DPO's beta and filter.

One more forward pass, without gradient, sums up the responses of every pair on all ranks. So the result depends neither
on the rows that the pairs fell into nor on the number of ranks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.logps import row_logps
from training.losses import Pairs, Ranked, rank
from training.metrics import row_pairs
from training.objective import Objective
from training.packing import Row

LEAST = 0.01  # of the configured beta: the batch's beta stays positive
NARROW = 1e-3  # reward margins that differ by less are rounding, and equal to the filter


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The global batch in the order of the step's pair numbers."""

    pairs: Pairs  # their sums alone
    weight: Tensor  # (pairs,)
    places: list[Tensor]  # of each row's pairs in it


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What beta-DPO makes of a global batch."""

    beta: Tensor  # ()
    kept: Tensor  # (pairs,) 0 where the pair is dropped; the weighted mean over the batch is 1
    running: Tensor  # (2,) running mean and standard deviation of the reward margins, this batch included


def gather(
    policy: nn.Module,
    objective: Objective,
    rows: Iterable[tuple[Row, bool]],
    numbers: Sequence[int],
    device: torch.device,
) -> Batch:
    """Sum up every pair's responses on all ranks. A collective."""
    place = {number: at for at, number in enumerate(numbers)}
    table = torch.zeros(5, len(numbers), dtype=torch.float64, device=device)
    places = []
    for row, counts in rows:
        places.append(torch.tensor([place[number] for number in row.pairs], device=device))
        given = row_pairs(row, row_logps(policy, row), objective)
        sums = torch.stack([given.chosen, given.rejected, given.ref_chosen, given.ref_rejected, row.weight])
        table[:, places[-1]] += sums.double() * float(counts)
    if dist.is_initialized():
        dist.all_reduce(table)
    chosen, rejected, ref_chosen, ref_rejected, weight = table
    unknown = torch.full_like(chosen, math.nan)
    pairs = Pairs(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_mean=unknown,
        rejected_mean=unknown,
        chosen_tokens=unknown,
        rejected_tokens=unknown,
    )
    return Batch(pairs=pairs, weight=weight, places=places)


def calibrate(batch: Batch, objective: Objective, running: Tensor, seed: int) -> Calibration:
    """beta-DPO, arXiv 2407.08639: beta_0 (1 + alpha (M - M_0)), M the batch's mean reward margin, M_0 its running mean.

    The running values start at 0 and take up the batch before they are used, as in the authors' code. The filter draws
    without replacement by a Gaussian weight around M_0: the largest of log-weight plus Gumbel noise. The noise is the
    seed's and made on the CPU, so that every rank and every resume draws the same pairs.
    """
    options = objective.options
    beta, alpha = float(options["beta"]), float(options["beta_alpha"])
    momentum, dropped = float(options.get("beta_momentum", 0.9)), float(options.get("beta_filter", 0.0))
    margins = beta * (batch.pairs.chosen_ratio - batch.pairs.rejected_ratio)
    running = momentum * running + (1 - momentum) * torch.stack([margins.mean(), margins.std(correction=0)])
    center, spread = running
    noise = torch.rand(len(margins), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    gumbel = -torch.log(-torch.log(noise.clamp(1e-12, 1 - 1e-12))).to(margins.device)
    log_weight = -0.5 * ((margins - center) / (spread + NARROW)) ** 2
    drawn = (log_weight + gumbel).topk(max(1, round(len(margins) * (1 - dropped)))).indices
    kept = torch.zeros_like(margins).index_fill(0, drawn, 1.0)
    return Calibration(
        beta=beta * (1 + alpha * (margins[drawn].mean() - center)).clamp(min=LEAST),
        kept=kept * batch.weight.sum() / (kept * batch.weight).sum(),
        running=running,
    )


@torch.no_grad()
def look(
    policy: nn.Module,
    objective: Objective,
    rows: Iterable[tuple[Row, bool]],
    numbers: Sequence[int],
    device: torch.device,
    *,
    running: Tensor | None = None,
    seed: int = 0,
) -> tuple[dict[int, dict[str, Any]], Tensor | None]:
    """What each row's pairs must know of the global batch, as `row_pairs` takes it; and beta-DPO's new running values.

    Without running values (held-out pairs) beta is the configured one, and no pair is dropped.
    """
    calibrates = objective.calibrates and running is not None
    if not (objective.needs_ranks or calibrates):
        return {}, running
    batch = gather(policy, objective, rows, numbers, device)
    told: dict[int, dict[str, Any]] = {place: {} for place in range(len(batch.places))}
    if objective.needs_ranks:
        whole = vars(rank(batch.pairs))
        for row, place in enumerate(batch.places):
            told[row]["ranked"] = Ranked(**{name: values[place].float() for name, values in whole.items()})
    if calibrates and running is not None:
        made = calibrate(batch, objective, running, seed)
        running = made.running
        for row, place in enumerate(batch.places):
            told[row] |= {"batch_beta": made.beta.float(), "kept": made.kept[place].float()}
    return told, running
