"""ORPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.objectives.loss import loss
from training.objectives.pair_logps import PairLogps
from training.objectives.terms import expected, minus_log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


@loss(
    formula="`-c/nw - beta L(log odds(c/nw) - log odds(r/nl))`",
    needs_reference=False,
    reads_sums=False,
    reads_label=True,
)
def orpo(pairs: PairLogps, *, beta: float) -> Tensor:
    """ORPO, arXiv 2403.07691 eq. 6-7: supervised loss plus the log odds ratio."""
    log_odds = log_odds_ratio(pairs.chosen_mean_logps, pairs.rejected_mean_logps)
    return -pairs.chosen_mean_logps + beta * expected(minus_log_sigmoid, log_odds, pairs)


def log_odds_ratio(chosen_mean_logps: Tensor, rejected_mean_logps: Tensor) -> Tensor:
    """log(odds(y_w) / odds(y_l)) of mean log-probabilities, at least float32, stable near probability 1."""
    import torch

    wide = torch.promote_types(chosen_mean_logps.dtype, torch.float32)
    chosen_mean_logps, rejected_mean_logps = chosen_mean_logps.to(wide), rejected_mean_logps.to(wide)
    return (chosen_mean_logps - rejected_mean_logps) - (log1mexp(chosen_mean_logps) - log1mexp(rejected_mean_logps))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 without cancellation (Maechler 2012); x is clamped below 0."""
    import torch

    x = x.clamp(max=-1e-6)
    near_zero = x > -0.6931
    # torch.where evaluates both branches: -1 in the branch not taken keeps NaN out of the gradient.
    close = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, close, far)
