"""Terms that several losses share. torch is imported when they are called: see losses/."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from training.objectives.pair_logps import PairLogps

if TYPE_CHECKING:
    from torch import Tensor


def log_sigmoid(z: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(z)


def minus_log_sigmoid(z: Tensor) -> Tensor:
    return -log_sigmoid(z)


def smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)


def expected(loss: Callable[[Tensor], Tensor], z: Tensor, pairs: PairLogps, label_smoothing: float = 0.0) -> Tensor:
    """Expected loss if chosen is the better response with probability p: p loss(z) + (1 - p) loss(-z)."""
    p = pairs.label * (1 - label_smoothing) + (1 - pairs.label) * label_smoothing
    return loss(z) if isinstance(p, float) and p == 1.0 else p * loss(z) + (1 - p) * loss(-z)


def gap(pairs: PairLogps, f_divergence: str, f_alpha: float, per_token: bool = False) -> Tensor:
    """h, the difference of the two log-ratios, or of their scores under an f-divergence."""
    a = divergence_score(pairs.chosen_ratio, f_divergence, f_alpha)
    b = divergence_score(pairs.rejected_ratio, f_divergence, f_alpha)
    return a / pairs.chosen_tokens - b / pairs.rejected_tokens if per_token else a - b


def divergence_score(ratio: Tensor, f_divergence: str, f_alpha: float) -> Tensor:
    """f'(pi / pi_ref) of a log-ratio, up to a constant; arXiv 2309.16240 table 1. Exponents are clamped at 80."""
    if f_divergence == "forward_kl":
        return 1 - (-ratio).clamp(max=80.0).exp()
    if f_divergence == "js":
        return math.log(2) + log_sigmoid(ratio)
    if f_divergence == "alpha" and f_alpha != 1.0:
        return (((f_alpha - 1) * ratio).clamp(max=80.0).exp() - 1) / (f_alpha - 1)
    return ratio
