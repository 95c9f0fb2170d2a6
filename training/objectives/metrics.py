"""Metrics of training and evaluation. Each mean is over pairs, of all rows and all ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from training.distributed.data_parallel import sum_over_groups
from training.objectives.objective import Objective
from training.objectives.pair_logps import PairLogps
from training.pairs.packing import PackedRow
from training.scoring.logps import TokenLogps, row_logps


def row_loss(
    policy: nn.Module, objective: Objective, row: PackedRow, **batch_values: Any
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Loss and metrics of each pair in a row, and the row's load-balancing loss if there is one.

    `batch_values` are keyword arguments of `pair_logps`.
    """
    tokens = row_logps(policy, row)
    pairs = pair_logps(row, tokens, objective, **batch_values)
    parts = objective.losses(pairs)
    return parts["loss"], row_metrics(row, tokens, pairs, parts, objective), tokens.balance_loss


def pair_logps(row: PackedRow, tokens: TokenLogps, objective: Objective, **batch_values: Any) -> PairLogps:
    """The losses' view of a row, in float64. `batch_values` are the fields of PairLogps that depend on other pairs."""
    loss_mask = row.loss_mask.to(tokens.logps.dtype)
    chosen_tokens, rejected_tokens = row.sums(loss_mask)
    weights = loss_mask if objective.ld_alpha == 1.0 else _ld_weights(row, loss_mask, objective.ld_alpha)
    chosen_logps, rejected_logps = row.sums(tokens.logps * weights)
    ref_chosen_logps, ref_rejected_logps = row.sums(row.ref_logps * weights)
    chosen_sum, rejected_sum = row.sums(tokens.logps * loss_mask)
    return PairLogps(
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
        chosen_mean_logps=chosen_sum / chosen_tokens,
        rejected_mean_logps=rejected_sum / rejected_tokens,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
        label=row.label.double() if row.has_soft_labels else 1.0,
        margin=row.margin.double() if objective.reads_margin else 0.0,
        wpo_weight=_wpo_weight(row, tokens, loss_mask) if objective.wpo else 1.0,
        sign=row.sign.double() if row.is_unpaired else 1.0,
        **batch_values,
    )


def _ld_weights(row: PackedRow, loss_mask: Tensor, ld_alpha: float) -> Tensor:
    """LD-DPO, arXiv 2409.06411 eq. 10: tokens beyond the length of the shorter response have the weight ld_alpha."""
    shorter = torch.minimum(*row.sums(loss_mask))[row.response_index // 2]
    return torch.where(row.counted_before.to(loss_mask.dtype) < shorter, loss_mask, loss_mask * ld_alpha)


@torch.no_grad()
def _wpo_weight(row: PackedRow, tokens: TokenLogps, loss_mask: Tensor) -> Tensor:
    """WPO, arXiv 2406.11827 eq. 5: the probability of the pair under the policy, relative to the policy's certainty."""
    chosen, rejected = row.sums((tokens.logps - tokens.collision) * loss_mask)
    chosen_tokens, rejected_tokens = row.sums(loss_mask)
    return torch.exp(chosen / chosen_tokens + rejected / rejected_tokens)


@torch.no_grad()
def row_metrics(
    row: PackedRow, tokens: TokenLogps, pairs: PairLogps, losses: Mapping[str, Tensor], objective: Objective
) -> dict[str, Tensor]:
    """Metrics of each pair, (pairs,) each."""
    values = {name: value.detach() for name, value in losses.items()}
    values |= _unpaired_metrics(row, pairs, objective) if row.is_unpaired else _paired_metrics(pairs, objective)
    values["entropy"] = _token_mean(row, pairs, tokens.entropy)
    if objective.needs_reference:
        # Half the squared log-ratio estimates KL(policy, reference). It stays finite on tokens of the data, which may
        # be unlikely under the policy.
        values["kl"] = _token_mean(row, pairs, (tokens.logps - row.ref_logps) ** 2 / 2)
    if row.is_unpaired and objective.reads_kl:
        values["kl/mismatched"] = pairs.kl.expand(len(row.pair_indices))
    return values


def _token_mean(row: PackedRow, pairs: PairLogps, values: Tensor) -> Tensor:
    """Mean over the loss mask of both responses, or of an unpaired row's answer; (response tokens,) to (pairs,)."""
    chosen, rejected = row.sums(values * row.loss_mask)
    if row.is_unpaired:
        return chosen / pairs.chosen_tokens
    return (chosen + rejected) / (pairs.chosen_tokens + pairs.rejected_tokens)


def _paired_metrics(pairs: PairLogps, objective: Objective) -> dict[str, Tensor]:
    chosen_reward, rejected_reward = objective.rewards(pairs)
    return {
        "rewards/chosen": chosen_reward,
        "rewards/rejected": rejected_reward,
        "rewards/accuracies": (chosen_reward > rejected_reward).float(),  # a tie is not a win
        "rewards/margins": chosen_reward - rejected_reward,
        "logps/chosen": pairs.chosen_mean_logps * pairs.chosen_tokens,
        "logps/rejected": pairs.rejected_mean_logps * pairs.rejected_tokens,
        "sft_loss": -pairs.chosen_mean_logps,
    }


def _unpaired_metrics(row: PackedRow, pairs: PairLogps, objective: Objective) -> dict[str, Tensor]:
    """Of unpaired rows: `chosen` means desirable rows and `rejected` undesirable ones, 0 for rows of the other kind.

    MetricWindow takes their means over the rows of each kind.
    """
    reward, zero = objective.rewards(pairs)[0], objective.zero_reward(pairs)
    desirable = (row.sign > 0).to(reward.dtype)
    values = {"desirable": desirable, "sft_loss": -pairs.chosen_mean_logps * desirable}
    for side, own in (("chosen", desirable), ("rejected", 1 - desirable)):
        values |= {
            f"rewards/{side}": reward * own,
            f"rewards/accuracies/{side}": (row.sign * (reward - zero) > 0) * own,
            f"logps/{side}": pairs.chosen_mean_logps * pairs.chosen_tokens * own,
        }
    return values


def kind_of(name: str) -> str | None:
    """Whether a metric of unpaired rows is a mean over the desirable (chosen) or the undesirable (rejected) ones."""
    return "chosen" if name == "sft_loss" else next((k for k in ("chosen", "rejected") if name.endswith(f"/{k}")), None)


def combine_kinds(means: dict[str, float]) -> dict[str, float]:
    """The means with the reward margin between the kinds of unpaired rows, and the accuracy: both count the same."""
    shares = [means[name] for name in ("rewards/accuracies/chosen", "rewards/accuracies/rejected") if name in means]
    if shares:
        means["rewards/accuracies"] = sum(shares) / len(shares)
    if len(shares) == 2:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


class MetricWindow:
    """Sums over the pairs since the last log, equal on all ranks.

    Ranks are summed at each step, not at each log, so that a run resumed within a window logs the same values.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []
        self._step: Tensor | None = None
        self._total: Tensor | None = None

    def add(self, values: Mapping[str, Tensor], weight: Tensor, tokens: int, is_filler: bool) -> None:
        """Add the values of a row's pairs, losses times the pair's weight. A filler row adds zeros."""
        self.names = [*values, "weight", "pairs", "tokens"]
        sums = [(value * weight if name.startswith("loss") else value).double().sum() for name, value in values.items()]
        sizes = torch.tensor([float(len(weight)), float(tokens)], dtype=torch.float64)
        sizes = sizes.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else sizes
        row = torch.cat([torch.stack([*sums, weight.double().sum()]), sizes]) * float(not is_filler)
        self._step = row if self._step is None else self._step + row

    def end_step(self) -> dict[str, Tensor]:
        """Sums of this step over all ranks, by name. Does not wait for the device."""
        assert self._step is not None
        sum_over_groups(self._step)
        step, self._step = self._step, None
        self._total = step if self._total is None else self._total + step
        return dict(zip(self.names, step, strict=True))

    def drop_step(self) -> None:
        """Discard the values since the last end_step, because the update was skipped."""
        self._step = None

    def means(self) -> dict[str, float]:
        """Means over pairs, and the numbers of pairs and tokens. Starts a new window. Empty if nothing was added."""
        sums = self.sums()
        if not sums:
            return {}
        self._total = None
        weight, pairs, tokens = sums.pop("weight"), sums.pop("pairs"), sums.pop("tokens")
        counts: dict[str | None, float] = {None: pairs}
        if (desirable := sums.pop("desirable", None)) is not None:
            counts |= {"chosen": desirable, "rejected": pairs - desirable}
        means = {}
        for name, value in sums.items():
            count = weight if name.startswith("loss") else counts.get(kind_of(name), pairs)
            if count:
                means[name] = value / count
        return {**combine_kinds(means), "pairs": pairs, "tokens": tokens}

    def sums(self) -> dict[str, float]:
        """Sums since the last log, by name."""
        return {} if self._total is None else dict(zip(self.names, self._total.tolist(), strict=True))

    def state(self) -> dict[str, list]:
        return {"names": self.names, "sums": [] if self._total is None else self._total.tolist()}

    def load(self, state: Mapping[str, list]) -> None:
        self.names = list(state["names"])
        total = torch.tensor(state["sums"], dtype=torch.float64, device=self.device)
        self._total = total if len(total) else None
