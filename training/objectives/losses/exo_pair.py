"""EXO for two responses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from training.objectives.loss import Divergence, loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import gap, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


def _at_reference(*, label_smoothing: float, **_: Any) -> float:
    e = label_smoothing
    return -math.log(2) - math.log(e * (1 - e)) / 2  # [log 1/2 - log(1-e)] / 2 + [log 1/2 - log e] / 2


@loss(
    formula="`s(z)[L(z) - log(1-e)] + s(-z)[L(-z) - log e]`, `z = beta h`, `e` the `label_smoothing`",
    at_reference=_at_reference,
)
def exo_pair(
    pairs: PairLogps,
    *,
    beta: float,
    label_smoothing: Annotated[float, Field(gt=0.0, le=0.5)],
    f_divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.0,
) -> Tensor:
    """EXO, arXiv 2402.00856 eq. 16: the reverse KL to the smoothed label."""
    z = beta * gap(pairs, f_divergence, f_alpha)
    e = label_smoothing
    return z.sigmoid() * (log_sigmoid(z) - math.log(1 - e)) + (-z).sigmoid() * (log_sigmoid(-z) - math.log(e))
