"""DPO, on sums or on means per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.objectives.loss import Divergence, Positive, Smoothing, logistic_at_reference, loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import expected, gap, minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


@loss(
    formula="`-(1-e) L(z) - e L(-z)`, `z = beta h - gamma - margin`, `e` the `label_smoothing`; "
    "`length_normalization: true` is `sigmoid_norm`",
    at_reference=logistic_at_reference,
    reads_label=True,
)
def sigmoid(
    pairs: PairLogps,
    *,
    beta: float,
    label_smoothing: Smoothing = 0.0,
    gamma: float = 0.0,
    length_normalization: bool = False,
    margin_scale: Positive = 0.0,
    f_divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.0,
) -> Tensor:
    """DPO, arXiv 2305.18290 eq. 7; label_smoothing is cDPO's flip probability, gamma a margin (ColossalAI)."""
    h = gap(pairs, f_divergence, f_alpha, per_token=length_normalization)
    return expected(minus_log_sigmoid, beta * h - gamma - margin_scale * pairs.margin, pairs, label_smoothing)


@loss(formula="`sigmoid` with `a/nw - b/nl` for `h`", at_reference=logistic_at_reference, reads_label=True)
def sigmoid_norm(
    pairs: PairLogps,
    *,
    beta: float,
    label_smoothing: Smoothing = 0.0,
    gamma: float = 0.0,
    margin_scale: Positive = 0.0,
    f_divergence: Divergence = "reverse_kl",
    f_alpha: float = 0.0,
) -> Tensor:
    """DPO on ratios per token, arXiv 2411.15124 eq. 6; gamma is a margin (ColossalAI's length_normalization)."""
    h = gap(pairs, f_divergence, f_alpha, per_token=True)
    return expected(minus_log_sigmoid, beta * h - gamma - margin_scale * pairs.margin, pairs, label_smoothing)
