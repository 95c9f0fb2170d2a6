"""NCA for two responses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.objectives.loss import loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


@loss(formula="`-L(beta a) - L(-beta a)/2 - L(-beta b)/2`", at_reference=lambda **_: 2 * math.log(2))
def nca_pair(pairs: PairLogps, *, beta: float) -> Tensor:
    """NCA, arXiv 2402.05369 eq. 12 for two responses."""
    a, b = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -log_sigmoid(a) - 0.5 * log_sigmoid(-a) - 0.5 * log_sigmoid(-b)
