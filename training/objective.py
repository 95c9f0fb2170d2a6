"""The objective of a run: a weighted sum of losses with their options."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.losses import LOSSES, Pairs
from training.options import DYNAMIC, SOFT, SORTED, Option, needs_reference, taken
from training.packing import Pair


@dataclass(frozen=True)
class Objective:
    """As `options.check` has passed it."""

    weights: Mapping[str, float]
    options: Mapping[str, Option]

    @property
    def needs_reference(self) -> bool:
        return needs_reference(self.weights, self.options)

    @property
    def needs_ranks(self) -> bool:
        """Whether a pair's loss depends on its rank in the global batch."""
        return not SORTED.isdisjoint(self.weights)

    @property
    def calibrates(self) -> bool:
        """Whether beta follows the reward margins of each global batch (beta-DPO)."""
        return "beta_alpha" in self.options

    @property
    def ld_alpha(self) -> float:
        return float(self.options.get("ld_alpha", 1.0))

    @property
    def margin_scale(self) -> float | None:
        """What a pair's score difference is multiplied by to be its margin; None where no margin was asked for."""
        return float(self.options["margin_scale"]) if "margin" in self.options else None

    @property
    def wpo(self) -> bool:
        return bool(self.options.get("wpo", False))

    def components(self, pairs: Pairs) -> dict[str, Tensor]:
        """Each loss per pair, by name."""
        options: dict[str, dict[str, Any]] = {name: taken(name, self.options) for name in self.weights}
        if pairs.batch_beta is not None:
            options = {n: {**o, "beta": pairs.batch_beta} if n in DYNAMIC else o for n, o in options.items()}
        return {name: LOSSES[name](pairs, **options[name]) * pairs.kept for name in self.weights}

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """Loss per pair: the total as `loss` and, where there are several, each component."""
        parts = self.components(pairs)
        total = torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(0)
        components = {f"loss/{name}": part for name, part in parts.items()} if len(parts) > 1 else {}
        return {"loss": total * pairs.factor if self.wpo else total, **components}

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Implicit rewards: of the ratio to the reference; without one of the sum (cpo) or of the mean."""
        beta = float(self.options.get("beta", 1.0))
        if self.needs_reference:
            return beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
        if "cpo" in self.weights:
            return beta * pairs.chosen, beta * pairs.rejected
        return beta * pairs.chosen_mean, beta * pairs.rejected_mean

    def start_values(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """The mean of each loss over the pairs while the policy equals its reference; without those that have none."""
        scale, means = self.margin_scale, {}
        margins = [0.0 if scale is None else scale * pair.margin for pair in pairs]
        for name in self.weights:
            found = [
                start_value(name, self.options, pair.label, margin) for pair, margin in zip(pairs, margins, strict=True)
            ]
            values = [value for value in found if value is not None]
            if values:
                means[name] = sum(values) / len(values)
        return means

    def check_pairs(self, pairs: Iterable[Pair]) -> str | None:
        """Raise ValueError where the pairs do not fit the objective; a note where they have scores that it ignores."""
        labels = scores = False
        for pair in pairs:
            labels |= pair.label != 1.0
            scores |= pair.margin != 0.0
        if labels and SOFT.isdisjoint(self.weights):
            raise ValueError(
                f"the pairs carry a label, which loss {', '.join(self.weights)} does not read: choose one of "
                f"{', '.join(sorted(SOFT))}, or prepare the pairs without it"
            )
        if self.margin_scale is not None and not scores:
            raise ValueError(
                "train.margin is `scores`, and no pair has scores: set train.margin and train.margin_scale to null, or "
                "prepare data with scores (score_chosen and score_rejected, scored completions, or a margin column)"
            )
        if scores and self.margin_scale is None:
            return (
                "the pairs have scores, and the loss ignores them (train.margin is null). To train with a margin, set "
                "train.margin to scores and train.margin_scale to a positive number"
            )
        return None


def start_value(name: str, options: Mapping[str, Option], label: float = 1.0, margin: float = 0.0) -> float | None:
    """A pair's loss while the policy equals its reference, derived by hand; None for a loss that has no such value.

    Then a = b = 0 and h = 0, also per token and under any divergence (each score is 0 at a ratio of 1); AOT's sorted
    differences are 0, and DPOP's penalty is 0. What is left is z = -(gamma + margin). With n(z) = -log sigmoid(z):
    n(0) = ln 2 and sigmoid(0) = 1/2. Reference-free losses depend on the model itself.
    """
    given = taken(name, options)
    beta, e, gamma = (float(given.get(option, 0.0)) for option in ("beta", "label_smoothing", "gamma"))
    z, p, ln2 = -(gamma + margin), label * (1 - e) + (1 - label) * e, math.log(2)
    match name:
        case "sigmoid" | "sigmoid_norm":
            return _mixed(p, z)
        case "simpo" if given.get("reference"):
            return _mixed(p, z)
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
            return 2 * ln2  # n(0) + n(0)/2 + n(0)/2; n(0) + n(0), while no reward has moved the shift
        case "aot" | "aot_unpaired" | "dpop":
            return ln2
        case "apo_zero" | "apo_down":
            return 1.0  # 1 - 1/2 + 1/2; 1/2 + 1 - 1/2
        case "discopop":
            return (1 + ln2) / 2  # the logistic loss ln 2 and the exponential loss 1, half of each
    return None


def _mixed(p: float, z: float) -> float:
    return _n(z) if p == 1.0 else p * _n(z) + (1 - p) * _n(-z)


def _n(z: float) -> float:
    """-log sigmoid(z) without overflow."""
    return max(-z, 0.0) + math.log1p(math.exp(-abs(z)))
