"""BCO for pairs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.objectives.loss import loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


@loss(
    formula="`-L(beta a - d) - L(d - beta b)`, `d` the mean reward of all earlier steps (0 in the evaluate stage)",
    at_reference=lambda **_: 2 * math.log(2),  # with a shift of 0
)
def bco_pair(pairs: PairLogps, *, beta: float) -> Tensor:
    """BCO, arXiv 2404.04656 eq. 9; rewards are shifted by the running mean of the rewards of earlier steps."""
    a, b = beta * pairs.chosen_ratio - pairs.reward_mean, beta * pairs.rejected_ratio - pairs.reward_mean
    return -log_sigmoid(a) - log_sigmoid(-b)
