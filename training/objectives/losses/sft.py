"""The supervised loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.objectives.loss import loss
from training.objectives.pair_logps import PairLogps

if TYPE_CHECKING:
    from torch import Tensor


@loss(formula="`-c/nw`", needs_reference=False, reads_sums=False)
def sft(pairs: PairLogps) -> Tensor:
    """Negative log-likelihood per token of the chosen response, to combine with other losses."""
    return -pairs.chosen_mean_logps
