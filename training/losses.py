"""Preference losses as pure functions: log-probabilities of pairs in, one loss per pair out.

The caller takes the mean over the global batch. A new loss is a function with the paper's equation on the line and
its name in LOSSES; its keyword arguments are the options that have an effect on it, which training/options.py names too
and so refuses the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """What a pair meets when the global batch is sorted, (pairs,) each, without gradient."""

    ref_gap: Tensor  # the reference's gap at the rank of the pair's own gap
    rejected: Tensor  # the rejected ratio at the rank of its chosen ratio
    chosen: Tensor  # the chosen ratio at the rank of its rejected ratio


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Log-probabilities of the responses, (pairs,) each."""

    chosen: Tensor  # summed over the counted tokens, as ld_alpha weighs them
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_mean: Tensor  # mean over the counted tokens, all alike
    rejected_mean: Tensor
    chosen_tokens: Tensor  # how many counted
    rejected_tokens: Tensor
    label: Tensor | float = 1.0  # how probably chosen is the better one
    margin: Tensor | float = 0.0  # by how much its reward should be higher, where a margin was asked for
    factor: Tensor | float = 1.0  # WPO's weight of the pair
    batch_beta: Tensor | None = None  # beta-DPO's beta of this batch; None: the configured beta
    kept: Tensor | float = 1.0  # 0 where beta-DPO's filter drops the pair; the mean over a batch is 1
    reward_mean: Tensor | float = 0.0  # running mean of all rewards, for bco_pair
    ranked: Ranked | None = None  # for aot; None where these pairs are the whole batch

    @property
    def chosen_ratio(self) -> Tensor:  # log pi(y_w|x) / pi_ref(y_w|x)
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.ref_rejected


def sigmoid(
    pairs: Pairs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    length_normalization: bool = False,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.0,
) -> Tensor:
    """DPO, arXiv 2305.18290 eq. 7; label_smoothing is cDPO's chance of a wrong label, gamma a margin (ColossalAI)."""
    gap = (_mean_gap if length_normalization else _gap)(pairs, f_divergence, f_alpha)
    z = beta * gap - gamma - pairs.margin
    return _soft(_minus_log_sigmoid, z, pairs, label_smoothing)


def sigmoid_norm(
    pairs: Pairs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.0,
) -> Tensor:
    """DPO on ratios per token, arXiv 2411.15124 eq. 6; gamma is a margin (ColossalAI's length_normalization)."""
    z = beta * _mean_gap(pairs, f_divergence, f_alpha) - gamma - pairs.margin
    return _soft(_minus_log_sigmoid, z, pairs, label_smoothing)


def hinge(pairs: Pairs, *, beta: float, f_divergence: str = "reverse_kl", f_alpha: float = 0.0) -> Tensor:
    """SLiC / RSO, arXiv 2309.06657 eq. 8."""
    return _soft(lambda z: torch.relu(1 - z), beta * _gap(pairs, f_divergence, f_alpha), pairs)


def ipo(pairs: Pairs, *, beta: float, f_divergence: str = "reverse_kl", f_alpha: float = 0.0) -> Tensor:
    """IPO, arXiv 2310.12036 eq. 17, on per-token averages as its authors confirmed."""
    return _soft(lambda h: (h - 1 / (2 * beta)) ** 2, _mean_gap(pairs, f_divergence, f_alpha), pairs)


def ipo_sum(pairs: Pairs, *, beta: float, f_divergence: str = "reverse_kl", f_alpha: float = 0.0) -> Tensor:
    """IPO on sums, as ROLL and OpenRLHF compute it: the same beta does not mean the same."""
    return _soft(lambda h: (h - 1 / (2 * beta)) ** 2, _gap(pairs, f_divergence, f_alpha), pairs)


def robust(
    pairs: Pairs, *, beta: float, label_smoothing: float, f_divergence: str = "reverse_kl", f_alpha: float = 0.0
) -> Tensor:
    """rDPO, arXiv 2403.00409 eq. 12: unbiased when labels are flipped with chance label_smoothing; note the sign."""
    z = beta * _gap(pairs, f_divergence, f_alpha) - pairs.margin
    e = label_smoothing
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def exo_pair(
    pairs: Pairs, *, beta: float, label_smoothing: float, f_divergence: str = "reverse_kl", f_alpha: float = 0.0
) -> Tensor:
    """EXO, arXiv 2402.00856 eq. 16: the reverse KL to the smoothed label."""
    z = beta * _gap(pairs, f_divergence, f_alpha)
    e = label_smoothing
    return z.sigmoid() * (logsigmoid(z) - math.log(1 - e)) + (-z).sigmoid() * (logsigmoid(-z) - math.log(e))


def nca_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """NCA, arXiv 2402.05369 eq. 12 for two responses."""
    a, b = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-b)


def bco_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """BCO, arXiv 2404.04656 eq. 9; the shift is the running mean of all rewards of the steps before."""
    a, b = beta * pairs.chosen_ratio - pairs.reward_mean, beta * pairs.rejected_ratio - pairs.reward_mean
    return -logsigmoid(a) - logsigmoid(-b)


def sppo_hard(pairs: Pairs, *, beta: float) -> Tensor:
    """SPPO, arXiv 2405.00675 eq. 4.7, with win rates 1 and 0."""
    return (pairs.chosen_ratio - 1 / (2 * beta)) ** 2 + (pairs.rejected_ratio + 1 / (2 * beta)) ** 2


def aot(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """AOT, arXiv 2406.05882 eq. 8: the policy's gaps dominate the reference's, sorted over the global batch."""
    ranked = pairs.ranked or rank(pairs)
    z = beta * (pairs.chosen - pairs.rejected - ranked.ref_gap)
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def aot_unpaired(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """AOT, eq. 7: the chosen ratios dominate the rejected ones, sorted over the global batch."""
    ranked = pairs.ranked or rank(pairs)

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        z = beta * (chosen - rejected)
        return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)

    # A term joins the chosen of one pair and the rejected of another. Each pair carries the value of its chosen's
    # term, and of its rejected's term the gradient alone, so that the batch sums to value and gradient of the whole.
    of_rejected = loss(ranked.chosen, pairs.rejected_ratio)
    return loss(pairs.chosen_ratio, ranked.rejected) + of_rejected - of_rejected.detach()


def apo_zero(pairs: Pairs, *, beta: float) -> Tensor:
    """APO, arXiv 2408.06266 eq. 4: chosen up, rejected down."""
    return 1 - torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


def apo_down(pairs: Pairs, *, beta: float) -> Tensor:
    """APO, eq. 5: both down, rejected more."""
    a, b = pairs.chosen_ratio, pairs.rejected_ratio
    return torch.sigmoid(beta * a) + 1 - torch.sigmoid(beta * (a - b))


def discopop(
    pairs: Pairs, *, beta: float, tau: float = 0.05, f_divergence: str = "reverse_kl", f_alpha: float = 0.0
) -> Tensor:
    """DiscoPOP, arXiv 2406.08414 eq. 5: logistic and exponential loss, mixed by sigmoid(z / tau)."""
    z = beta * _gap(pairs, f_divergence, f_alpha)
    # m exp(-z) as one exponential: where z is far below 0, m is 0 and exp(-z) infinite.
    return -torch.sigmoid(-z / tau) * logsigmoid(z) + torch.exp(logsigmoid(z / tau) - z)


def dpop(pairs: Pairs, *, beta: float, dpop_lambda: float = 50.0) -> Tensor:
    """DPO-Positive, arXiv 2402.13228 eq. 3: a penalty where chosen becomes less likely than under the reference."""
    a, b = pairs.chosen_ratio, pairs.rejected_ratio
    return -logsigmoid(beta * (a - b - dpop_lambda * torch.relu(-a)))


def simpo(pairs: Pairs, *, beta: float, gamma: float = 0.0, reference: bool = False) -> Tensor:
    """SimPO, arXiv 2405.14734 eq. 6; gamma is a margin between rewards. With a reference: ColossalAI's form."""
    gap = _mean_gap(pairs) if reference else pairs.chosen_mean - pairs.rejected_mean
    return _soft(_minus_log_sigmoid, beta * gap - gamma - pairs.margin, pairs)


def cpo(pairs: Pairs, *, beta: float, cpo_alpha: float = 1.0) -> Tensor:
    """CPO, arXiv 2401.08417 eq. 7: preference without a reference, plus the supervised loss."""
    z = beta * (pairs.chosen - pairs.rejected) - pairs.margin
    return _soft(_minus_log_sigmoid, z, pairs) - cpo_alpha * pairs.chosen_mean


def orpo(pairs: Pairs, *, beta: float) -> Tensor:
    """ORPO, arXiv 2403.07691 eq. 6-7: supervised loss plus the log odds ratio."""
    log_odds = log_odds_ratio(pairs.chosen_mean, pairs.rejected_mean)
    return -pairs.chosen_mean + beta * _soft(_minus_log_sigmoid, log_odds, pairs)


def sft(pairs: Pairs) -> Tensor:
    """Negative log-likelihood per token of the chosen response: a term to combine."""
    return -pairs.chosen_mean


_WITH_REFERENCE = (sigmoid, sigmoid_norm, hinge, ipo, ipo_sum, robust, exo_pair, nca_pair, bco_pair, sppo_hard)
_MORE = (aot, aot_unpaired, apo_zero, apo_down, discopop, dpop)
_WITHOUT = (simpo, cpo, orpo, sft)
LOSSES: dict[str, Callable[..., Tensor]] = {loss.__name__: loss for loss in (*_WITH_REFERENCE, *_MORE, *_WITHOUT)}


def score(ratio: Tensor, f_divergence: str, f_alpha: float) -> Tensor:
    """f'(pi / pi_ref) of a log-ratio up to a constant, arXiv 2309.16240 table 1; exponents stay below 80."""
    if f_divergence == "forward_kl":
        return 1 - torch.exp(torch.clamp(-ratio, max=80.0))
    if f_divergence == "js":
        return math.log(2) + logsigmoid(ratio)
    if f_divergence == "alpha" and f_alpha != 1.0:
        return (torch.exp(torch.clamp((f_alpha - 1) * ratio, max=80.0)) - 1) / (f_alpha - 1)
    return ratio


@torch.no_grad()
def rank(pairs: Pairs) -> Ranked:
    """Sort the whole batch: which value stands at whose rank."""
    gap, a, b = pairs.chosen - pairs.rejected, pairs.chosen_ratio, pairs.rejected_ratio
    return Ranked(
        ref_gap=_at_rank(gap, pairs.ref_chosen - pairs.ref_rejected), rejected=_at_rank(a, b), chosen=_at_rank(b, a)
    )


def _at_rank(own: Tensor, others: Tensor) -> Tensor:
    """For each of `own` the value of `others` at the same rank."""
    return others.sort().values[own.argsort(stable=True).argsort(stable=True)]


def _gap(pairs: Pairs, f_divergence: str = "reverse_kl", f_alpha: float = 0.0) -> Tensor:
    a, b = (score(ratio, f_divergence, f_alpha) for ratio in (pairs.chosen_ratio, pairs.rejected_ratio))
    return a - b


def _mean_gap(pairs: Pairs, f_divergence: str = "reverse_kl", f_alpha: float = 0.0) -> Tensor:
    a, b = (score(ratio, f_divergence, f_alpha) for ratio in (pairs.chosen_ratio, pairs.rejected_ratio))
    return a / pairs.chosen_tokens - b / pairs.rejected_tokens


def _minus_log_sigmoid(z: Tensor) -> Tensor:
    return -logsigmoid(z)


def _soft(loss: Callable[[Tensor], Tensor], z: Tensor, pairs: Pairs, label_smoothing: float = 0.0) -> Tensor:
    """A loss of z when chosen is the better one with probability p: p loss(z) + (1 - p) loss(-z)."""
    p = pairs.label * (1 - label_smoothing) + (1 - pairs.label) * label_smoothing
    return loss(z) if isinstance(p, float) and p == 1.0 else p * loss(z) + (1 - p) * loss(-z)


def log_odds_ratio(chosen_mean: Tensor, rejected_mean: Tensor) -> Tensor:
    """log(odds(y_w) / odds(y_l)) of mean log-probabilities, at least in float32 and stable near probability 1."""
    wide = torch.promote_types(chosen_mean.dtype, torch.float32)
    chosen_mean, rejected_mean = chosen_mean.to(wide), rejected_mean.to(wide)
    return (chosen_mean - rejected_mean) - (log1mexp(chosen_mean) - log1mexp(rejected_mean))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 without cancellation (Maechler 2012); x is kept below 0."""
    x = x.clamp(max=-1e-6)
    near_zero = x > -0.6931
    # Each branch sees a harmless value where the other is taken, so that no NaN enters the gradient.
    close = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, close, far)
