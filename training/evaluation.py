"""What a policy makes of each pair: implied rewards, and how far it moved from the reference."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.logps import score_pairs
from training.losses import Objective, Pairs
from training.packing import Pair


@dataclass(frozen=True)
class PairValues:
    """Of one pair; rewards as the training metrics have them."""

    id: str
    chosen_reward: float
    rejected_reward: float
    chosen_tokens: int  # that count
    rejected_tokens: int
    kl: float  # half the squared log-ratio per counted token, as in training.metrics

    @property
    def margin(self) -> float:
        return self.chosen_reward - self.rejected_reward


def pair_values(
    model: nn.Module, objective: Objective, pairs: Sequence[Pair], row_tokens: int, device: torch.device
) -> list[PairValues]:
    """Values of each pair, in their order."""
    model.eval()
    scores = score_pairs(model, pairs, row_tokens, device)
    masks = [pair.chosen_mask for pair in pairs], [pair.rejected_mask for pair in pairs]
    tokens = [torch.tensor([float(sum(mask)) for mask in side]) for side in masks]
    rewards = objective.rewards(
        Pairs(
            chosen=_sums([score[0] for score in scores], masks[0]),
            rejected=_sums([score[1] for score in scores], masks[1]),
            ref_chosen=_sums([pair.ref_chosen or () for pair in pairs], masks[0]),
            ref_rejected=_sums([pair.ref_rejected or () for pair in pairs], masks[1]),
            chosen_tokens=tokens[0],
            rejected_tokens=tokens[1],
        )
    )
    drift = [_drift(pair, *score) for pair, score in zip(pairs, scores, strict=True)]
    columns = (*(column.tolist() for column in (*rewards, *tokens)), drift)
    return [
        PairValues(pair.id, won, lost, int(first), int(second), kl)
        for pair, won, lost, first, second, kl in zip(pairs, *columns, strict=True)
    ]


@torch.no_grad()
def answer_ratios(
    policy: nn.Module,
    reference: nn.Module | AbstractContextManager[nn.Module],
    answers: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    row_tokens: int,
    device: torch.device,
) -> list[float]:
    """log policy(y|x) - log reference(y|x) of each prompt's own answer; their mean estimates KL(policy, reference).

    An item is (prompt, the policy's answer, the reference's): a pair, so that its prompt is computed once for both.
    """
    pairs = [
        Pair(str(number), prompt, own, other, [1] * len(own), [1] * len(other))
        for number, (prompt, own, other) in enumerate(answers)
    ]
    policy.eval()
    live = score_pairs(policy, pairs, row_tokens, device)
    with nullcontext(reference) if isinstance(reference, nn.Module) else reference as model:
        stored = score_pairs(model.eval(), pairs, row_tokens, device)
    return [sum(new[0]) - sum(old[0]) for new, old in zip(live, stored, strict=True)]


def _sums(values: Sequence[Sequence[float]], masks: Sequence[Sequence[int]]) -> Tensor:
    """Over the counted tokens of each response, (pairs,); no values (no reference) sum to 0."""
    return torch.tensor(
        [
            sum(value for value, counts in zip(row, mask, strict=bool(row)) if counts)
            for row, mask in zip(values, masks, strict=True)
        ],
        dtype=torch.float64,
    ).float()


def _drift(pair: Pair, chosen: Sequence[float], rejected: Sequence[float]) -> float:
    mask = [*pair.chosen_mask, *pair.rejected_mask]
    reference = [*(pair.ref_chosen or ()), *(pair.ref_rejected or ())] or [0.0] * len(mask)
    squares = [
        (live - stored) ** 2 / 2
        for live, stored, counts in zip([*chosen, *rejected], reference, mask, strict=True)
        if counts
    ]
    return sum(squares) / max(len(squares), 1)
