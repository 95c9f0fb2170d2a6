"""Robust DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from training.objectives.loss import Divergence, Positive, logistic, loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import gap, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


def _at_reference(*, label_smoothing: float, margin_scale: float, margin: float, **_: Any) -> float:
    z, e = -margin_scale * margin, label_smoothing
    return ((1 - e) * logistic(z) - e * logistic(-z)) / (1 - 2 * e)  # ln 2 without a margin


@loss(
    formula="`[-(1-e) L(z) + e L(-z)] / (1-2e)`, `z = beta h - margin`, `e` the `label_smoothing`",
    at_reference=_at_reference,
)
def robust(
    pairs: PairLogps,
    *,
    beta: float,
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)],
    margin_scale: Positive = 0.0,
    f_divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.0,
) -> Tensor:
    """rDPO, arXiv 2403.00409 eq. 12: unbiased if labels are flipped with probability label_smoothing."""
    z = beta * gap(pairs, f_divergence, f_alpha) - margin_scale * pairs.margin
    e = label_smoothing
    return (-(1 - e) * log_sigmoid(z) + e * log_sigmoid(-z)) / (1 - 2 * e)
