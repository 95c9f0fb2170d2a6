"""DiscoPOP."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.objectives.loss import Divergence, Positive, loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import gap, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


@loss(
    formula="`(1-m)(-L(z)) + m exp(-z)`, `z = beta h`, `m = s(z/tau)`",
    at_reference=lambda **_: (1 + math.log(2)) / 2,  # half of the logistic loss ln 2, half of the exponential loss 1
)
def discopop(
    pairs: PairLogps,
    *,
    beta: float,
    tau: Positive = 0.05,
    f_divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.0,
) -> Tensor:
    """DiscoPOP, arXiv 2406.08414 eq. 5: logistic and exponential loss, mixed by sigmoid(z / tau)."""
    z = beta * gap(pairs, f_divergence, f_alpha)
    # m exp(-z) as one exponential: for z << 0, m is 0 and exp(-z) is infinite.
    return -(-z / tau).sigmoid() * log_sigmoid(z) + (log_sigmoid(z / tau) - z).exp()
