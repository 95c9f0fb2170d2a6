"""One vocabulary of metrics for training and evaluation. Every mean is over pairs, of all rows and all ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from training.logps import TokenLogps
from training.losses import Pairs, Ranked
from training.objective import Objective
from training.packing import Row


def row_pairs(
    row: Row,
    tokens: TokenLogps,
    objective: Objective,
    *,
    reward_mean: Tensor | float = 0.0,
    ranked: Ranked | None = None,
    batch_beta: Tensor | None = None,
    kept: Tensor | float = 1.0,
) -> Pairs:
    """A row's token values as the losses take them."""
    counts, reference = row.counts.to(tokens.logps.dtype), row.reference.to(tokens.logps.dtype)
    chosen_tokens, rejected_tokens = row.sums(counts)
    weights = counts if objective.ld_alpha == 1.0 else _length_desensitised(row, counts, objective.ld_alpha)
    chosen, rejected = row.sums(tokens.logps * weights)
    ref_chosen, ref_rejected = row.sums(reference * weights)
    plain_chosen, plain_rejected = row.sums(tokens.logps * counts)
    scale = objective.margin_scale
    return Pairs(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_mean=plain_chosen / chosen_tokens,
        rejected_mean=plain_rejected / rejected_tokens,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
        label=row.label.to(counts.dtype) if row.soft else 1.0,
        margin=0.0 if scale is None else scale * row.margin.to(counts.dtype),
        factor=_wpo(row, tokens, counts) if objective.wpo else 1.0,
        reward_mean=reward_mean,
        ranked=ranked,
        batch_beta=batch_beta,
        kept=kept,
    )


def _length_desensitised(row: Row, counts: Tensor, ld_alpha: float) -> Tensor:
    """LD-DPO, arXiv 2409.06411 eq. 10: tokens beyond the shorter response's length count ld_alpha times."""
    shorter = torch.minimum(*row.sums(counts))[row.response // 2]
    return torch.where(row.order.to(counts.dtype) < shorter, counts, counts * ld_alpha)


@torch.no_grad()
def _wpo(row: Row, tokens: TokenLogps, counts: Tensor) -> Tensor:
    """WPO, arXiv 2406.11827 eq. 5: how likely the policy itself would write the pair, against its own certainty."""
    excess = row.sums((tokens.logps - tokens.collision) * counts)
    (chosen, rejected), (chosen_tokens, rejected_tokens) = excess, row.sums(counts)
    return torch.exp(chosen / chosen_tokens + rejected / rejected_tokens)


@torch.no_grad()
def row_metrics(
    row: Row, tokens: TokenLogps, pairs: Pairs, losses: Mapping[str, Tensor], objective: Objective
) -> dict[str, Tensor]:
    """Values per pair, (pairs,) each."""
    chosen_reward, rejected_reward = objective.rewards(pairs)
    counts, both_tokens = row.counts, pairs.chosen_tokens + pairs.rejected_tokens
    values = {
        **{name: value.detach() for name, value in losses.items()},
        "rewards/chosen": chosen_reward,
        "rewards/rejected": rejected_reward,
        "rewards/accuracies": (chosen_reward > rejected_reward).float(),  # a tie is not a win
        "rewards/margins": chosen_reward - rejected_reward,
        "logps/chosen": pairs.chosen_mean * pairs.chosen_tokens,
        "logps/rejected": pairs.rejected_mean * pairs.rejected_tokens,
        "sft_loss": -pairs.chosen_mean,
        "entropy": torch.stack(row.sums(tokens.entropy * counts)).sum(0) / both_tokens,
    }
    if objective.needs_reference:
        # Half the squared log-ratio: an estimate of KL(policy, reference) that stays finite on tokens of the data,
        # which need not be likely under the policy.
        drift = (tokens.logps - row.reference) ** 2 / 2 * counts
        values["kl"] = torch.stack(row.sums(drift)).sum(0) / both_tokens
    if pairs.batch_beta is not None:
        values["beta"] = pairs.batch_beta.expand(len(chosen_reward))
    return values


class Window:
    """Sums over the pairs since the last log, the same on every rank.

    Summed over ranks at each step and not at each log, so that a resume in the middle of a window is exact.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []
        self._step: Tensor | None = None
        self._total: Tensor | None = None

    def add(self, values: Mapping[str, Tensor], weight: Tensor, tokens: int, counts: bool) -> None:
        """Values per pair of one row, losses times the pair's weight; a row that does not count adds zeros."""
        self.names = [*values, "weight", "pairs", "tokens"]
        sums = [(value * weight if name.startswith("loss") else value).double().sum() for name, value in values.items()]
        made = torch.tensor([float(len(weight)), float(tokens)], dtype=torch.float64)
        made = made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made
        row = torch.cat([torch.stack([*sums, weight.double().sum()]), made]) * float(counts)
        self._step = row if self._step is None else self._step + row

    def end_step(self) -> dict[str, Tensor]:
        """This step's sums over all ranks, by name; no wait for the device."""
        assert self._step is not None
        if dist.is_initialized():
            dist.all_reduce(self._step)
        step, self._step = self._step, None
        self._total = step if self._total is None else self._total + step
        return dict(zip(self.names, step, strict=True))

    def drop_step(self) -> None:
        """Forget what was added since the last end_step: its update was skipped."""
        self._step = None

    def means(self) -> dict[str, float]:
        """Means over pairs, the number of pairs and of tokens; starts a new window. Empty where nothing was added."""
        sums = self.sums()
        if not sums:
            return {}
        self._total = None
        weight, pairs, tokens = sums.pop("weight"), sums.pop("pairs"), sums.pop("tokens")
        means = {name: value / (weight if name.startswith("loss") else pairs) for name, value in sums.items()}
        return {**means, "pairs": pairs, "tokens": tokens}

    def sums(self) -> dict[str, float]:
        """Since the last log, by name."""
        return {} if self._total is None else dict(zip(self.names, self._total.tolist(), strict=True))

    def state(self) -> dict[str, list]:
        return {"names": self.names, "sums": [] if self._total is None else self._total.tolist()}

    def load(self, state: Mapping[str, list]) -> None:
        self.names = list(state["names"])
        total = torch.tensor(state["sums"], dtype=torch.float64, device=self.device)
        self._total = total if len(total) else None
