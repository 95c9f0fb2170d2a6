"""CPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.objectives.loss import Positive, loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import expected, minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


@loss(formula="`-L(beta (c - r) - margin) - cpo_alpha c/nw`", needs_reference=False, reads_label=True)
def cpo(pairs: PairLogps, *, beta: float, cpo_alpha: Positive = 1.0, margin_scale: Positive = 0.0) -> Tensor:
    """CPO, arXiv 2401.08417 eq. 7: reference-free preference loss plus the supervised loss."""
    z = beta * (pairs.chosen_logps - pairs.rejected_logps) - margin_scale * pairs.margin
    return expected(minus_log_sigmoid, z, pairs) - cpo_alpha * pairs.chosen_mean_logps
