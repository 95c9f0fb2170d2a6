"""The objective of a run: a weighted sum of losses with their options."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.objectives.losses import LOSSES, PairLogps
from training.objectives.options import (
    READS_LABEL,
    SORTS_BATCH,
    UNPAIRED,
    Option,
    check_rows,
    needs_reference,
    options_of,
)
from training.pairs.pair import Pair
from training.pairs.pair_columns import PairColumns, columns_of


@dataclass(frozen=True)
class Objective:
    """Weights and options of the losses; `options.check` has validated them."""

    weights: Mapping[str, float]
    options: Mapping[str, Option]

    @property
    def needs_reference(self) -> bool:
        return needs_reference(self.weights, self.options)

    @property
    def sorts_batch(self) -> bool:
        """Whether a pair's loss depends on its position in the sorted global batch."""
        return not SORTS_BATCH.isdisjoint(self.weights)

    @property
    def reads_kl(self) -> bool:
        """Whether rewards of unpaired rows are compared with KTO's KL of the global batch, not with 0."""
        return self.needs_reference and set(self.weights) != {"apo_zero_unpaired"}

    @property
    def beta(self) -> float:
        """The factor of rewards: 1 without a loss that has a beta."""
        return float(self.options.get("beta", 1.0))

    @property
    def ld_alpha(self) -> float:
        return float(self.options.get("ld_alpha", 1.0))

    @property
    def margin_scale(self) -> float | None:
        """Factor from a pair's score difference to its margin; None without `train.margin`."""
        return float(self.options["margin_scale"]) if "margin" in self.options else None

    @property
    def wpo(self) -> bool:
        return bool(self.options.get("wpo", False))

    def components(self, pairs: PairLogps) -> dict[str, Tensor]:
        """Each loss per pair, by name."""
        return {name: LOSSES[name](pairs, **options_of(name, self.options)) for name in self.weights}

    def losses(self, pairs: PairLogps) -> dict[str, Tensor]:
        """Loss per pair: the total as `loss`, and the components `loss/<name>` if there are several."""
        parts = self.components(pairs)
        total = torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(0)
        components = {f"loss/{name}": part for name, part in parts.items()} if len(parts) > 1 else {}
        return {"loss": total * pairs.wpo_weight if self.wpo else total, **components}

    def rewards(self, pairs: PairLogps) -> tuple[Tensor, Tensor]:
        """Implicit rewards: beta times the log-ratio or, without a reference, the sum (cpo) or mean log-probability."""
        if self.needs_reference:
            return self.beta * pairs.chosen_ratio, self.beta * pairs.rejected_ratio
        if "cpo" in self.weights:
            return self.beta * pairs.chosen_logps, self.beta * pairs.rejected_logps
        return self.beta * pairs.chosen_mean_logps, self.beta * pairs.rejected_mean_logps

    def zero_reward(self, pairs: PairLogps) -> Tensor:
        """The reward that separates desirable from undesirable answers: beta times KTO's KL, or 0."""
        return self.beta * pairs.kl if self.reads_kl else torch.zeros_like(pairs.chosen_logps[0])

    def losses_at_reference(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Mean of each loss while the policy equals its reference; without losses that have no such value."""
        scale, means = self.margin_scale or 0.0, {}
        for name in self.weights:
            values = [
                loss_at_reference(name, self.options, pair.label, scale * pair.margin, pair.sign) for pair in pairs
            ]
            known = [value for value in values if value is not None]
            if known:
                means[name] = sum(known) / len(known)
        return means

    def check_pairs(self, pairs: Sequence[Pair]) -> str | None:
        """ValueError if the pairs do not fit the objective; returns a note if the objective ignores their scores."""
        columns = columns_of(pairs)
        check_rows(self.weights, bool((columns.sign != 0).any()))
        if not UNPAIRED.isdisjoint(self.weights):
            return self._check_balance(columns)
        if (columns.label != 1.0).any() and READS_LABEL.isdisjoint(self.weights):
            raise ValueError(
                f"the pairs have labels, and loss {', '.join(self.weights)} ignores them: choose one of "
                f"{', '.join(sorted(READS_LABEL))}, or prepare the pairs without labels"
            )
        has_scores = (columns.margin != 0.0).any()
        if self.margin_scale is not None and not has_scores:
            raise ValueError(
                "train.margin is `scores`, but no pair has scores: set train.margin and train.margin_scale to null, or "
                "prepare data with scores (score_chosen and score_rejected, scored completions, or a margin column)"
            )
        if has_scores and self.margin_scale is None:
            return (
                "the pairs have scores, but the loss ignores them (train.margin is null). To train with a margin, set "
                "train.margin to scores and train.margin_scale to a positive number"
            )
        return None

    def _check_balance(self, columns: PairColumns) -> str | None:
        """A note if the weights of the two kinds of rows are outside the range of KTO's paper (eq. 8)."""
        up, down = (float(columns.weight[columns.sign == sign].sum()) for sign in (1, -1))
        first, second = (float(self.options.get(name, 1.0)) for name in ("desirable_weight", "undesirable_weight"))
        if not up or not down or 1.0 <= round(first * up / (second * down), 1) <= 1.3:
            return None
        low, high = second * down / up, first * up / down
        return (
            f"{up:.0f} rows are desirable and {down:.0f} undesirable; KTO recommends to balance them: set "
            f"train.desirable_weight to {low:.2f} to {low * 4 / 3:.2f}, or train.undesirable_weight to "
            f"{high * 3 / 4:.2f} to {high:.2f}"
        )


def loss_at_reference(
    name: str, options: Mapping[str, Option], label: float = 1.0, margin: float = 0.0, sign: float = 1.0
) -> float | None:
    """A pair's loss while the policy equals its reference, derived by hand; None if the loss has no such value.

    Both log-ratios a and b are 0, and so is the gap h, also per token and with any f-divergence (each score is 0 at a
    ratio of 1). AOT's sorted differences and DPOP's penalty are 0. That leaves z = -(gamma + margin). With
    n(z) = -log sigmoid(z): n(0) = ln 2 and sigmoid(0) = 1/2. The value of a reference-free loss depends on the model.
    """
    own = options_of(name, options)
    beta, e, gamma = (float(own.get(option, 0.0)) for option in ("beta", "label_smoothing", "gamma"))
    z, p, ln2 = -(gamma + margin), label * (1 - e) + (1 - label) * e, math.log(2)
    match name:
        case "simpo" if not own.get("reference"):
            return None
        case "sigmoid" | "sigmoid_norm" | "simpo":
            return _n(z) if p == 1.0 else p * _n(z) + (1 - p) * _n(-z)
        case "robust":
            return ((1 - e) * _n(z) - e * _n(-z)) / (1 - 2 * e)  # ln 2 without a margin
        case "hinge":
            return 1.0  # max(0, 1 - 0), for either label
        case "ipo" | "ipo_sum":
            return 1 / (4 * beta**2)  # (0 - 1 / (2 beta))^2, for either label
        case "sppo_hard":
            return 1 / (2 * beta**2)  # twice that
        case "exo_pair":
            return -ln2 - math.log(e * (1 - e)) / 2  # [log 1/2 - log(1-e)] / 2 + [log 1/2 - log e] / 2
        case "nca_pair" | "bco_pair":
            return 2 * ln2  # n(0) + n(0)/2 + n(0)/2; n(0) + n(0) with a shift of 0
        case "aot" | "aot_unpaired" | "dpop":
            return ln2
        case "apo_zero" | "apo_down":
            return 1.0  # 1 - 1/2 + 1/2; 1/2 + 1 - 1/2
        case "kto" | "apo_zero_unpaired":  # the sigmoid of 0, weighted: the KL is 0 too
            return float(own.get("desirable_weight" if sign > 0 else "undesirable_weight", 1.0)) / 2
        case "discopop":
            return (1 + ln2) / 2  # half of the logistic loss ln 2 and half of the exponential loss 1
    return None


def _n(z: float) -> float:
    """-log sigmoid(z) without overflow."""
    return max(-z, 0.0) + math.log1p(math.exp(-abs(z)))
