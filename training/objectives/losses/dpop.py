"""DPO-Positive."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.objectives.loss import Positive, loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


@loss(
    formula="`-L(beta (h - dpop_lambda max(0, -a)))`: a penalty if chosen is less likely than under the reference",
    at_reference=lambda **_: math.log(2),  # the penalty is 0
)
def dpop(pairs: PairLogps, *, beta: float, dpop_lambda: Positive = 50.0) -> Tensor:
    """DPO-Positive, arXiv 2402.13228 eq. 3: a penalty if chosen is less likely than under the reference."""
    a, b = pairs.chosen_ratio, pairs.rejected_ratio
    return minus_log_sigmoid(beta * (a - b - dpop_lambda * (-a).relu()))
