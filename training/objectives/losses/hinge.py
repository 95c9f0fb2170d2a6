"""SLiC and RSO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.objectives.loss import Divergence, loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import expected, gap

if TYPE_CHECKING:
    from torch import Tensor


@loss(formula="`max(0, 1 - beta h)`", at_reference=lambda **_: 1.0, reads_label=True)
def hinge(pairs: PairLogps, *, beta: float, f_divergence: Divergence = "reverse_kl", f_alpha: float = 0.0) -> Tensor:
    """SLiC / RSO, arXiv 2309.06657 eq. 8."""
    return expected(lambda z: (1 - z).relu(), beta * gap(pairs, f_divergence, f_alpha), pairs)
