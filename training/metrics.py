"""One vocabulary of metrics for training and evaluation. Every mean is over pairs, of all rows and all ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from training.logps import TokenLogps
from training.losses import Objective, Pairs
from training.packing import Row


def row_pairs(row: Row, logps: Tensor) -> Pairs:
    chosen, rejected = row.sums(logps)
    ref_chosen, ref_rejected = row.sums(row.reference.to(logps.dtype))
    chosen_tokens, rejected_tokens = row.sums(torch.ones_like(logps))
    return Pairs(chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens)


@torch.no_grad()
def row_metrics(
    row: Row, tokens: TokenLogps, pairs: Pairs, losses: Mapping[str, Tensor], objective: Objective
) -> dict[str, Tensor]:
    """Values per pair, (pairs,) each."""
    chosen_reward, rejected_reward = objective.rewards(pairs)
    both_tokens = pairs.chosen_tokens + pairs.rejected_tokens
    entropy = torch.stack(row.sums(tokens.entropy)).sum(0) / both_tokens
    # Half the squared log-ratio: an estimate of KL(policy, reference) that stays finite on tokens of the data,
    # which need not be likely under the policy.
    drift = torch.stack(row.sums((tokens.logps - row.reference) ** 2 / 2)).sum(0) / both_tokens
    return {
        **{name: value.detach() for name, value in losses.items()},
        "rewards/chosen": chosen_reward,
        "rewards/rejected": rejected_reward,
        "rewards/accuracies": (chosen_reward > rejected_reward).float(),  # a tie is not a win
        "rewards/margins": chosen_reward - rejected_reward,
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
        "sft_loss": -pairs.chosen_mean,
        "entropy": entropy,
        "kl": drift,
    }


class Window:
    """Sums over the pairs since the last log, the same on every rank.

    Summed over ranks at each step and not at each log, so that a resume in the middle of a window is exact.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []
        self._step: Tensor | None = None
        self._total: Tensor | None = None

    def add(self, values: Mapping[str, Tensor], tokens: int, counts: bool) -> None:
        """Values per pair of one row; a row that does not count adds its names and zeros."""
        pairs = len(next(iter(values.values())))
        extra = {"pairs": torch.tensor(float(pairs)), "tokens": torch.tensor(float(tokens))}
        columns = [*(value.double().sum() for value in values.values()), *extra.values()]
        self.names = [*values, *extra]
        row = torch.stack([column.to(self.device, torch.float64) for column in columns]) * float(counts)
        self._step = row if self._step is None else self._step + row

    def end_step(self) -> None:
        assert self._step is not None
        if dist.is_initialized():
            dist.all_reduce(self._step)
        self._total = self._step if self._total is None else self._total + self._step
        self._step = None

    def means(self) -> dict[str, float]:
        """Means over pairs, the number of pairs and of tokens; starts a new window."""
        assert self._total is not None
        sums = dict(zip(self.names, self._total.tolist(), strict=True))
        self._total = None
        pairs, tokens = sums.pop("pairs"), sums.pop("tokens")
        return {**{name: value / pairs for name, value in sums.items()}, "pairs": pairs, "tokens": tokens}

    def state(self) -> dict[str, list]:
        return {"names": self.names, "sums": [] if self._total is None else self._total.tolist()}

    def load(self, state: Mapping[str, list]) -> None:
        self.names = list(state["names"])
        total = torch.tensor(state["sums"], dtype=torch.float64, device=self.device)
        self._total = total if len(total) else None
