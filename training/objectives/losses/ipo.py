"""IPO, on means per token or on sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.objectives.loss import Divergence, loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import expected, gap

if TYPE_CHECKING:
    from torch import Tensor


def _at_reference(*, beta: float, **_: Any) -> float:
    return 1 / (4 * beta**2)  # (0 - 1 / (2 beta))^2, for either label


@loss(formula="`(a/nw - b/nl - 1/(2 beta))^2`", at_reference=_at_reference, reads_label=True)
def ipo(pairs: PairLogps, *, beta: float, f_divergence: Divergence = "reverse_kl", f_alpha: float = 0.0) -> Tensor:
    """IPO, arXiv 2310.12036 eq. 17, on per-token averages as its authors confirmed."""
    h = gap(pairs, f_divergence, f_alpha, per_token=True)
    return expected(lambda h: (h - 1 / (2 * beta)) ** 2, h, pairs)


@loss(formula="`(h - 1/(2 beta))^2`", at_reference=_at_reference, reads_label=True)
def ipo_sum(pairs: PairLogps, *, beta: float, f_divergence: Divergence = "reverse_kl", f_alpha: float = 0.0) -> Tensor:
    """IPO on sums, as in ROLL and OpenRLHF. A beta of `ipo` has another meaning here."""
    return expected(lambda h: (h - 1 / (2 * beta)) ** 2, gap(pairs, f_divergence, f_alpha), pairs)
