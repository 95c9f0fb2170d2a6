"""The objective of a run: a weighted sum of losses with their options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from training.objectives import mixture
from training.objectives.loss import Option
from training.objectives.mixture import Mixture
from training.objectives.pair_logps import PairLogps
from training.objectives.registry import LOSSES
from training.pairs.pair import Pair
from training.pairs.pair_columns import PairColumns, columns_of


@dataclass(frozen=True)
class Objective:
    """`train.loss` and the options that its losses share; `mixture.check` has validated them."""

    loss: Mixture
    options: Mapping[str, Option]

    @cached_property
    def weights(self) -> dict[str, float]:
        return mixture.weights_of(self.loss)

    @cached_property
    def needs_reference(self) -> bool:
        return mixture.needs_reference(self.loss)

    @property
    def sorts_batch(self) -> bool:
        """Whether a pair's loss depends on its position in the sorted global batch."""
        return any(LOSSES[name].sorts_batch for name in self.loss)

    @property
    def reads_kl(self) -> bool:
        """Whether rewards of unpaired rows are compared with KTO's KL of the global batch, not with 0."""
        reads = any(LOSSES[name].reads_kl for name in self.loss)
        return self.needs_reference and (reads or not mixture.is_unpaired(self.loss))

    @property
    def beta(self) -> float:
        """The factor of rewards: 1 without a loss that has a beta."""
        return float(self.options.get("beta", 1.0))

    @property
    def ld_alpha(self) -> float:
        return float(self.options.get("ld_alpha", 1.0))

    @cached_property
    def reads_margin(self) -> bool:
        """Whether a loss subtracts a margin between the scores of a pair."""
        return any("margin_scale" in mixture.options_of(self.loss, name) for name in self.loss)

    @property
    def wpo(self) -> bool:
        return bool(self.options.get("wpo", False))

    def _arguments(self, name: str) -> dict[str, Option]:
        return mixture.arguments_of(self.loss, name, self.options)

    def components(self, pairs: PairLogps) -> dict[str, Tensor]:
        """Each loss per pair, by name."""
        return {name: LOSSES[name](pairs, **self._arguments(name)) for name in self.loss}

    def losses(self, pairs: PairLogps) -> dict[str, Tensor]:
        """Loss per pair: the total as `loss`, and the components `loss/<name>` if there are several."""
        parts = self.components(pairs)
        total = torch.stack([weight * parts[name] for name, weight in self.weights.items()]).sum(0)
        components = {f"loss/{name}": part for name, part in parts.items()} if len(parts) > 1 else {}
        return {"loss": total * pairs.wpo_weight if self.wpo else total, **components}

    def rewards(self, pairs: PairLogps) -> tuple[Tensor, Tensor]:
        """Implicit rewards: beta times the log-ratio.

        Without a reference, beta times the summed log-probability, or the mean if no loss reads sums.
        """
        if self.needs_reference:
            return self.beta * pairs.chosen_ratio, self.beta * pairs.rejected_ratio
        if any(LOSSES[name].reads_sums for name in self.loss):
            return self.beta * pairs.chosen_logps, self.beta * pairs.rejected_logps
        return self.beta * pairs.chosen_mean_logps, self.beta * pairs.rejected_mean_logps

    def zero_reward(self, pairs: PairLogps) -> Tensor:
        """The reward that separates desirable from undesirable answers: beta times KTO's KL, or 0."""
        return self.beta * pairs.kl if self.reads_kl else torch.zeros_like(pairs.chosen_logps[0])

    def losses_at_reference(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Mean of each loss while the policy equals its reference; without losses that have no such value."""
        means = {}
        for name in self.loss:
            given, loss = self._arguments(name), LOSSES[name]
            values = [loss.start_value(given, pair.label, pair.margin, pair.sign) for pair in pairs]
            known = [value for value in values if value is not None]
            if known:
                means[name] = sum(known) / len(known)
        return means

    def check_pairs(self, pairs: Sequence[Pair]) -> str | None:
        """ValueError if the pairs do not fit the objective; returns a note if the objective ignores their scores."""
        columns, names = columns_of(pairs), ", ".join(self.loss)
        mixture.check_rows(self.loss, bool((columns.sign != 0).any()))
        if mixture.is_unpaired(self.loss):
            return self._check_balance(columns)
        if (columns.label != 1.0).any() and not any(LOSSES[name].reads_label for name in self.loss):
            raise ValueError(
                f"the pairs have labels, and loss {names} ignores them: choose one of "
                f"{', '.join(name for name, loss in LOSSES.items() if loss.reads_label)}, or prepare the pairs without "
                "labels"
            )
        has_scores = (columns.margin != 0.0).any()
        if self.reads_margin and not has_scores:
            raise ValueError(
                f"`margin_scale` of train.loss ({names}) scales the scores of a pair, but no pair has scores: remove "
                "it, or prepare data with scores (score_chosen and score_rejected, scored completions, or a margin "
                "column)"
            )
        if has_scores and not self.reads_margin:
            takers = [name for name, loss in LOSSES.items() if "margin_scale" in loss.options]
            return (
                "the pairs have scores, but the loss ignores them. To train with a margin, set `margin_scale` of a "
                f"loss ({', '.join(takers)}) to a positive number, as in train.loss.{takers[0]}.margin_scale=0.1"
            )
        return None

    def _check_balance(self, columns: PairColumns) -> str | None:
        """A note if the weights of the two kinds of rows are outside the range of KTO's paper (eq. 8)."""
        up, down = (float(columns.weight[columns.sign == sign].sum()) for sign in (1, -1))
        for name in self.loss:
            own = mixture.options_of(self.loss, name)
            first, second = (float(own.get(f"{kind}_weight", 1.0)) for kind in ("desirable", "undesirable"))
            if up and down and not 1.0 <= round(first * up / (second * down), 1) <= 1.3:
                low, high = second * down / up, first * up / down
                return (
                    f"{up:.0f} rows are desirable and {down:.0f} undesirable; KTO recommends to balance them: set "
                    f"train.loss.{name}.desirable_weight to {low:.2f} to {low * 4 / 3:.2f}, or "
                    f"train.loss.{name}.undesirable_weight to {high * 3 / 4:.2f} to {high:.2f}"
                )
        return None
