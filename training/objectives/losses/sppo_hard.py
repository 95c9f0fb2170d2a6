"""SPPO with hard win rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.objectives.loss import loss
from training.objectives.pair_logps import PairLogps

if TYPE_CHECKING:
    from torch import Tensor


@loss(
    formula="`(a - 1/(2 beta))^2 + (b + 1/(2 beta))^2`",
    at_reference=lambda *, beta, **_: 1 / (2 * beta**2),
)
def sppo_hard(pairs: PairLogps, *, beta: float) -> Tensor:
    """SPPO, arXiv 2405.00675 eq. 4.7, with win rates 1 and 0."""
    return (pairs.chosen_ratio - 1 / (2 * beta)) ** 2 + (pairs.rejected_ratio + 1 / (2 * beta)) ** 2
