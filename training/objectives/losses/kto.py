"""Losses of unpaired rows, whose one answer is desirable or undesirable: KTO and APO-zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.objectives.loss import Positive, loss
from training.objectives.pair_logps import PairLogps

if TYPE_CHECKING:
    from torch import Tensor


def _at_reference(*, sign: float, desirable_weight: float, undesirable_weight: float, **_: Any) -> float:
    return (desirable_weight if sign > 0 else undesirable_weight) / 2  # the sigmoid of 0: the KL is 0 too


@loss(
    formula="`w (1 - s(beta (a - KL)))` of a desirable row, `w (1 - s(beta (KL - a)))` of an undesirable one, "
    "`w` the weight of its kind",
    at_reference=_at_reference,
    unpaired=True,
    reads_kl=True,
)
def kto(
    pairs: PairLogps, *, beta: float, desirable_weight: Positive = 1.0, undesirable_weight: Positive = 1.0
) -> Tensor:
    """KTO, arXiv 2402.01306 eq. 7, on unpaired rows: w (1 - sigmoid(+-beta (log-ratio - KL)))."""
    weight = _weight_of_sign(pairs, desirable_weight, undesirable_weight)
    return weight * (-pairs.sign * beta * (pairs.chosen_ratio - pairs.kl)).sigmoid()


@loss(formula="`kto` with 0 for `KL`", at_reference=_at_reference, unpaired=True)
def apo_zero_unpaired(
    pairs: PairLogps, *, beta: float, desirable_weight: Positive = 1.0, undesirable_weight: Positive = 1.0
) -> Tensor:
    """APO-zero of unpaired rows, as in TRL: KTO without its KL term."""
    weight = _weight_of_sign(pairs, desirable_weight, undesirable_weight)
    return weight * (-pairs.sign * beta * pairs.chosen_ratio).sigmoid()


def _weight_of_sign(pairs: PairLogps, desirable: float, undesirable: float) -> Tensor | float:
    return ((1 + pairs.sign) * desirable + (1 - pairs.sign) * undesirable) / 2
