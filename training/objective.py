"""The objective of a run: a weighted sum of losses with their options."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from training.losses import LOSSES, Pairs
from training.options import SOFT, SORTED, Option, needs_reference, taken
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
    def ld_alpha(self) -> float:
        return float(self.options.get("ld_alpha", 1.0))

    @property
    def margin_scale(self) -> float | None:
        """What a pair's score difference is multiplied by to be its margin; None where no margin was asked for."""
        return float(self.options["margin_scale"]) if "margin" in self.options else None

    @property
    def wpo(self) -> bool:
        return bool(self.options.get("wpo", False))

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """Loss per pair: the total as `loss` and, where there are several, each component."""
        parts = {name: LOSSES[name](pairs, **taken(name, self.options)) for name in self.weights}
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
