"""SimPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.objectives.loss import Positive, logistic_at_reference, loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import expected, minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


@loss(
    formula="`-L(beta (c/nw - r/nl) - gamma - margin)`; with `reference: true`, `a/nw - b/nl` replaces `c/nw - r/nl`",
    at_reference=logistic_at_reference,
    needs_reference=False,
    reads_sums=False,
    reads_label=True,
)
def simpo(
    pairs: PairLogps,
    *,
    beta: float,
    gamma: float = 0.0,
    reference: bool = False,
    margin_scale: Positive = 0.0,
) -> Tensor:
    """SimPO, arXiv 2405.14734 eq. 6; gamma is a margin between rewards. `reference` selects ColossalAI's form."""
    gap = pairs.chosen_mean_logps - pairs.rejected_mean_logps
    if reference:
        gap = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
    return expected(minus_log_sigmoid, beta * gap - gamma - margin_scale * pairs.margin, pairs)
