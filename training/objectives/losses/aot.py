"""AOT: losses of the sorted global batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.objectives.loss import Smoothing, loss
from training.objectives.pair_logps import OrderStatistics, PairLogps
from training.objectives.terms import smoothed

if TYPE_CHECKING:
    from torch import Tensor


@loss(
    formula="`sigmoid` of `beta x`, `x = sort(c - r) - sort(c0 - r0)`",
    at_reference=lambda **_: math.log(2),  # the sorted differences are 0
    sorts_batch=True,
)
def aot(pairs: PairLogps, *, beta: float, label_smoothing: Smoothing = 0.0) -> Tensor:
    """AOT, arXiv 2406.05882 eq. 8: the sorted gaps of the policy dominate those of the reference."""
    statistics = pairs.order_statistics or order_statistics(pairs)
    gap = pairs.chosen_logps - pairs.rejected_logps
    return smoothed(beta * (gap - statistics.ref_gap), label_smoothing)


@loss(
    formula="`sigmoid` of `beta x`, `x = sort(a) - sort(b)`",
    at_reference=lambda **_: math.log(2),
    sorts_batch=True,
)
def aot_unpaired(pairs: PairLogps, *, beta: float, label_smoothing: Smoothing = 0.0) -> Tensor:
    """AOT, eq. 7: the sorted chosen ratios dominate the sorted rejected ratios."""
    statistics = pairs.order_statistics or order_statistics(pairs)
    # A term combines the chosen ratio of one pair with the rejected ratio of another pair. Each pair adds the term of
    # its chosen ratio, and only the gradient of the term of its rejected ratio: the sum over the batch has the right
    # value and the right gradient.
    chosen_term = smoothed(beta * (pairs.chosen_ratio - statistics.rejected_ratio), label_smoothing)
    rejected_term = smoothed(beta * (statistics.chosen_ratio - pairs.rejected_ratio), label_smoothing)
    return chosen_term + rejected_term - rejected_term.detach()


def order_statistics(pairs: PairLogps) -> OrderStatistics:
    """Sort the whole batch, and give each pair the values at its position."""
    gap = (pairs.chosen_logps - pairs.rejected_logps).detach()
    ref_gap = (pairs.ref_chosen_logps - pairs.ref_rejected_logps).detach()
    a, b = pairs.chosen_ratio.detach(), pairs.rejected_ratio.detach()
    return OrderStatistics(
        ref_gap=_at_same_position(gap, ref_gap),
        rejected_ratio=_at_same_position(a, b),
        chosen_ratio=_at_same_position(b, a),
    )


def _at_same_position(own: Tensor, others: Tensor) -> Tensor:
    """For each of `own`, the value of `others` at the same position when both are sorted."""
    return others.sort().values[own.argsort(stable=True).argsort(stable=True)]
