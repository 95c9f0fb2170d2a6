"""APO on pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.objectives.loss import loss
from training.objectives.pair_logps import PairLogps

if TYPE_CHECKING:
    from torch import Tensor


@loss(formula="`1 - s(beta a) + s(beta b)`", at_reference=lambda **_: 1.0)  # 1 - 1/2 + 1/2
def apo_zero(pairs: PairLogps, *, beta: float) -> Tensor:
    """APO, arXiv 2408.06266 eq. 4: chosen up, rejected down."""
    return 1 - (beta * pairs.chosen_ratio).sigmoid() + (beta * pairs.rejected_ratio).sigmoid()


@loss(formula="`s(beta a) + 1 - s(beta h)`", at_reference=lambda **_: 1.0)  # 1/2 + 1 - 1/2
def apo_down(pairs: PairLogps, *, beta: float) -> Tensor:
    """APO, eq. 5: both down, rejected more."""
    a, b = pairs.chosen_ratio, pairs.rejected_ratio
    return (beta * a).sigmoid() + 1 - (beta * (a - b)).sigmoid()
