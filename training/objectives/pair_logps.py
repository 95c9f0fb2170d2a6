"""The inputs of the losses: the log-probabilities of pairs, and values of the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OrderStatistics:
    """For each pair, values at its position in the sorted global batch; (pairs,) each, without gradient."""

    ref_gap: Tensor  # the reference's gap at the position of the pair's own gap
    rejected_ratio: Tensor  # at the position of the pair's chosen ratio
    chosen_ratio: Tensor  # at the position of the pair's rejected ratio


@dataclass(frozen=True, kw_only=True)
class PairLogps:
    """The losses' inputs: log-probabilities of the responses, and other values of each pair; (pairs,) float64 each."""

    chosen_logps: Tensor  # sum over the loss mask, with the token weights of ld_alpha
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    chosen_mean_logps: Tensor  # mean over the loss mask, unweighted
    rejected_mean_logps: Tensor
    chosen_tokens: Tensor  # in the loss mask
    rejected_tokens: Tensor
    label: Tensor | float = 1.0  # probability that chosen is the better response
    margin: Tensor | float = 0.0  # difference of the data's scores; 0 if no loss has a `margin_scale`
    wpo_weight: Tensor | float = 1.0
    reward_mean: Tensor | float = 0.0  # running mean of all rewards (bco_pair)
    order_statistics: OrderStatistics | None = None  # for AOT; None if these pairs are the whole global batch
    sign: Tensor | float = 1.0  # of an unpaired row, whose answer is `chosen`: +1 desirable, -1 undesirable
    batch_kl: Tensor | None = None  # KTO's KL of the global batch; None if these rows are the whole global batch

    @property
    def chosen_ratio(self) -> Tensor:  # log pi(y_w|x) / pi_ref(y_w|x)
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected_logps - self.ref_rejected_logps

    @property
    def kl(self) -> Tensor:
        return kl_estimate(self.rejected_ratio) if self.batch_kl is None else self.batch_kl


def kl_estimate(ratios: Tensor) -> Tensor:
    """KTO's estimate of KL(policy, reference): the mean log-ratio of answers to other prompts, at least 0."""
    return ratios.detach().mean().clamp(min=0.0)
