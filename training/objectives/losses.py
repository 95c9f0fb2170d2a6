"""Preference losses as pure functions: log-probabilities of pairs in, one loss per pair out.

The caller takes the mean over the global batch. options.py lists the keyword arguments of each loss, and rejects
options that have no effect on a loss. CONTRIBUTING.md describes how to add one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.objectives.options import LOSS_OPTIONS


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
    margin: Tensor | float = 0.0  # of the rewards, scaled; 0 without `train.margin`
    wpo_weight: Tensor | float = 1.0
    reward_mean: Tensor | float = 0.0  # running mean of all rewards (bco_pair)
    order_statistics: OrderStatistics | None = None  # for AOT; None if these pairs are the whole global batch
    f_divergence: str = "reverse_kl"  # whose scores replace the log-ratios in h
    f_alpha: float = 0.0  # of the divergence `alpha`
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
        return mismatched_kl(self.rejected_ratio) if self.batch_kl is None else self.batch_kl


def sigmoid(
    pairs: PairLogps,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    length_normalization: bool = False,
) -> Tensor:
    """DPO, arXiv 2305.18290 eq. 7; label_smoothing is cDPO's flip probability, gamma a margin (ColossalAI)."""
    z = beta * _h(pairs, per_token=length_normalization) - gamma - pairs.margin
    return _expected(_minus_log_sigmoid, z, pairs, label_smoothing)


def sigmoid_norm(pairs: PairLogps, *, beta: float, label_smoothing: float = 0.0, gamma: float = 0.0) -> Tensor:
    """DPO on ratios per token, arXiv 2411.15124 eq. 6; gamma is a margin (ColossalAI's length_normalization)."""
    return sigmoid(pairs, beta=beta, label_smoothing=label_smoothing, gamma=gamma, length_normalization=True)


def hinge(pairs: PairLogps, *, beta: float) -> Tensor:
    """SLiC / RSO, arXiv 2309.06657 eq. 8."""
    return _expected(lambda z: torch.relu(1 - z), beta * _h(pairs), pairs)


def ipo(pairs: PairLogps, *, beta: float) -> Tensor:
    """IPO, arXiv 2310.12036 eq. 17, on per-token averages as its authors confirmed."""
    return _expected(lambda h: (h - 1 / (2 * beta)) ** 2, _h(pairs, per_token=True), pairs)


def ipo_sum(pairs: PairLogps, *, beta: float) -> Tensor:
    """IPO on sums, as in ROLL and OpenRLHF. A beta of `ipo` has another meaning here."""
    return _expected(lambda h: (h - 1 / (2 * beta)) ** 2, _h(pairs), pairs)


def robust(pairs: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    """rDPO, arXiv 2403.00409 eq. 12: unbiased if labels are flipped with probability label_smoothing."""
    z = beta * _h(pairs) - pairs.margin
    e = label_smoothing
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def exo_pair(pairs: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    """EXO, arXiv 2402.00856 eq. 16: the reverse KL to the smoothed label."""
    z = beta * _h(pairs)
    e = label_smoothing
    return z.sigmoid() * (logsigmoid(z) - math.log(1 - e)) + (-z).sigmoid() * (logsigmoid(-z) - math.log(e))


def nca_pair(pairs: PairLogps, *, beta: float) -> Tensor:
    """NCA, arXiv 2402.05369 eq. 12 for two responses."""
    a, b = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-b)


def bco_pair(pairs: PairLogps, *, beta: float) -> Tensor:
    """BCO, arXiv 2404.04656 eq. 9; rewards are shifted by the running mean of the rewards of earlier steps."""
    a, b = beta * pairs.chosen_ratio - pairs.reward_mean, beta * pairs.rejected_ratio - pairs.reward_mean
    return -logsigmoid(a) - logsigmoid(-b)


def sppo_hard(pairs: PairLogps, *, beta: float) -> Tensor:
    """SPPO, arXiv 2405.00675 eq. 4.7, with win rates 1 and 0."""
    return (pairs.chosen_ratio - 1 / (2 * beta)) ** 2 + (pairs.rejected_ratio + 1 / (2 * beta)) ** 2


def aot(pairs: PairLogps, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """AOT, arXiv 2406.05882 eq. 8: the sorted gaps of the policy dominate those of the reference."""
    statistics = pairs.order_statistics or order_statistics(pairs)
    gap = pairs.chosen_logps - pairs.rejected_logps
    return _smoothed(beta * (gap - statistics.ref_gap), label_smoothing)


def aot_unpaired(pairs: PairLogps, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """AOT, eq. 7: the sorted chosen ratios dominate the sorted rejected ratios."""
    statistics = pairs.order_statistics or order_statistics(pairs)
    # A term combines the chosen ratio of one pair with the rejected ratio of another pair. Each pair adds the term of
    # its chosen ratio, and only the gradient of the term of its rejected ratio: the sum over the batch has the right
    # value and the right gradient.
    chosen_term = _smoothed(beta * (pairs.chosen_ratio - statistics.rejected_ratio), label_smoothing)
    rejected_term = _smoothed(beta * (statistics.chosen_ratio - pairs.rejected_ratio), label_smoothing)
    return chosen_term + rejected_term - rejected_term.detach()


def apo_zero(pairs: PairLogps, *, beta: float) -> Tensor:
    """APO, arXiv 2408.06266 eq. 4: chosen up, rejected down."""
    return 1 - torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


def apo_down(pairs: PairLogps, *, beta: float) -> Tensor:
    """APO, eq. 5: both down, rejected more."""
    a, b = pairs.chosen_ratio, pairs.rejected_ratio
    return torch.sigmoid(beta * a) + 1 - torch.sigmoid(beta * (a - b))


def kto(pairs: PairLogps, *, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> Tensor:
    """KTO, arXiv 2402.01306 eq. 7, on unpaired rows: w (1 - sigmoid(+-beta (log-ratio - KL)))."""
    weight = _weight_of_sign(pairs, desirable_weight, undesirable_weight)
    return weight * torch.sigmoid(-pairs.sign * beta * (pairs.chosen_ratio - pairs.kl))


def apo_zero_unpaired(
    pairs: PairLogps, *, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """APO-zero of unpaired rows, as in TRL: KTO without its KL term."""
    weight = _weight_of_sign(pairs, desirable_weight, undesirable_weight)
    return weight * torch.sigmoid(-pairs.sign * beta * pairs.chosen_ratio)


def discopop(pairs: PairLogps, *, beta: float, tau: float = 0.05) -> Tensor:
    """DiscoPOP, arXiv 2406.08414 eq. 5: logistic and exponential loss, mixed by sigmoid(z / tau)."""
    z = beta * _h(pairs)
    # m exp(-z) as one exponential: for z << 0, m is 0 and exp(-z) is infinite.
    return -torch.sigmoid(-z / tau) * logsigmoid(z) + torch.exp(logsigmoid(z / tau) - z)


def dpop(pairs: PairLogps, *, beta: float, dpop_lambda: float = 50.0) -> Tensor:
    """DPO-Positive, arXiv 2402.13228 eq. 3: a penalty if chosen is less likely than under the reference."""
    a, b = pairs.chosen_ratio, pairs.rejected_ratio
    return -logsigmoid(beta * (a - b - dpop_lambda * torch.relu(-a)))


def simpo(pairs: PairLogps, *, beta: float, gamma: float = 0.0, reference: bool = False) -> Tensor:
    """SimPO, arXiv 2405.14734 eq. 6; gamma is a margin between rewards. `reference` selects ColossalAI's form."""
    gap = pairs.chosen_mean_logps - pairs.rejected_mean_logps
    if reference:
        gap = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
    return _expected(_minus_log_sigmoid, beta * gap - gamma - pairs.margin, pairs)


def cpo(pairs: PairLogps, *, beta: float, cpo_alpha: float = 1.0) -> Tensor:
    """CPO, arXiv 2401.08417 eq. 7: reference-free preference loss plus the supervised loss."""
    z = beta * (pairs.chosen_logps - pairs.rejected_logps) - pairs.margin
    return _expected(_minus_log_sigmoid, z, pairs) - cpo_alpha * pairs.chosen_mean_logps


def orpo(pairs: PairLogps, *, beta: float) -> Tensor:
    """ORPO, arXiv 2403.07691 eq. 6-7: supervised loss plus the log odds ratio."""
    log_odds = log_odds_ratio(pairs.chosen_mean_logps, pairs.rejected_mean_logps)
    return -pairs.chosen_mean_logps + beta * _expected(_minus_log_sigmoid, log_odds, pairs)


def sft(pairs: PairLogps) -> Tensor:
    """Negative log-likelihood per token of the chosen response, to combine with other losses."""
    return -pairs.chosen_mean_logps


LOSSES: dict[str, Callable[..., Tensor]] = {name: globals()[name] for name in LOSS_OPTIONS}


def divergence_score(ratio: Tensor, f_divergence: str, f_alpha: float) -> Tensor:
    """f'(pi / pi_ref) of a log-ratio, up to a constant; arXiv 2309.16240 table 1. Exponents are clamped at 80."""
    if f_divergence == "forward_kl":
        return 1 - torch.exp(torch.clamp(-ratio, max=80.0))
    if f_divergence == "js":
        return math.log(2) + logsigmoid(ratio)
    if f_divergence == "alpha" and f_alpha != 1.0:
        return (torch.exp(torch.clamp((f_alpha - 1) * ratio, max=80.0)) - 1) / (f_alpha - 1)
    return ratio


@torch.no_grad()
def order_statistics(pairs: PairLogps) -> OrderStatistics:
    """Sort the whole batch, and give each pair the values at its position."""
    gap, a, b = pairs.chosen_logps - pairs.rejected_logps, pairs.chosen_ratio, pairs.rejected_ratio
    return OrderStatistics(
        ref_gap=_at_same_position(gap, pairs.ref_chosen_logps - pairs.ref_rejected_logps),
        rejected_ratio=_at_same_position(a, b),
        chosen_ratio=_at_same_position(b, a),
    )


@torch.no_grad()
def mismatched_kl(ratios: Tensor) -> Tensor:
    """KTO's estimate of KL(policy, reference): the mean log-ratio of answers to other prompts, at least 0."""
    return ratios.mean().clamp(min=0.0)


def _weight_of_sign(pairs: PairLogps, desirable: float, undesirable: float) -> Tensor | float:
    return ((1 + pairs.sign) * desirable + (1 - pairs.sign) * undesirable) / 2


def _at_same_position(own: Tensor, others: Tensor) -> Tensor:
    """For each of `own`, the value of `others` at the same position when both are sorted."""
    return others.sort().values[own.argsort(stable=True).argsort(stable=True)]


def _h(pairs: PairLogps, per_token: bool = False) -> Tensor:
    """The difference of the two log-ratios, or of their scores under an f-divergence."""
    a = divergence_score(pairs.chosen_ratio, pairs.f_divergence, pairs.f_alpha)
    b = divergence_score(pairs.rejected_ratio, pairs.f_divergence, pairs.f_alpha)
    return a / pairs.chosen_tokens - b / pairs.rejected_tokens if per_token else a - b


def _minus_log_sigmoid(z: Tensor) -> Tensor:
    return -logsigmoid(z)


def _smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def _expected(loss: Callable[[Tensor], Tensor], z: Tensor, pairs: PairLogps, label_smoothing: float = 0.0) -> Tensor:
    """Expected loss if chosen is the better response with probability p: p loss(z) + (1 - p) loss(-z)."""
    p = pairs.label * (1 - label_smoothing) + (1 - pairs.label) * label_smoothing
    return loss(z) if isinstance(p, float) and p == 1.0 else p * loss(z) + (1 - p) * loss(-z)


def log_odds_ratio(chosen_mean_logps: Tensor, rejected_mean_logps: Tensor) -> Tensor:
    """log(odds(y_w) / odds(y_l)) of mean log-probabilities, at least float32, stable near probability 1."""
    wide = torch.promote_types(chosen_mean_logps.dtype, torch.float32)
    chosen_mean_logps, rejected_mean_logps = chosen_mean_logps.to(wide), rejected_mean_logps.to(wide)
    return (chosen_mean_logps - rejected_mean_logps) - (log1mexp(chosen_mean_logps) - log1mexp(rejected_mean_logps))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 without cancellation (Maechler 2012); x is clamped below 0."""
    x = x.clamp(max=-1e-6)
    near_zero = x > -0.6931
    # torch.where evaluates both branches: -1 in the branch not taken keeps NaN out of the gradient.
    close = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, close, far)
