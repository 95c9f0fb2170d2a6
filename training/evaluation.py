"""What a policy makes of each pair: implied rewards, and how far it moved from the reference."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training import loop
from training.logps import score_pairs
from training.objective import Objective
from training.packing import Pair, Row
from training.proof import scoring


@dataclass(frozen=True, kw_only=True)
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
    scorer: nn.Module, objective: Objective, pairs: Sequence[Pair], row_tokens: int, device: torch.device
) -> tuple[dict[str, float], list[PairValues]]:
    """The means over all pairs, as in training, and the values of each pair in their order."""
    found: dict[int, PairValues] = {}

    def keep(row: Row, values: dict[str, Tensor]) -> None:
        kl = values.get("kl", torch.zeros(len(row.pairs)))
        columns = values["rewards/chosen"], values["rewards/rejected"], *row.sums(row.counts), kl
        for number, won, lost, first, second, drift in zip(row.pairs, *(c.tolist() for c in columns), strict=True):
            found[number] = PairValues(
                id=pairs[number].id,
                chosen_reward=won,
                rejected_reward=lost,
                chosen_tokens=int(first),
                rejected_tokens=int(second),
                kl=drift,
            )

    means = loop.evaluate(scorer, objective, pairs, row_tokens, device, each=keep)
    return means, [found[number] for number in range(len(pairs))]


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
    with scoring(policy, pairs, device) as scorer:
        live = score_pairs(scorer, pairs, row_tokens, device)
    entered = nullcontext(reference) if isinstance(reference, nn.Module) else reference
    with entered as model, scoring(model, pairs, device) as scorer:
        stored = score_pairs(scorer, pairs, row_tokens, device)
    return [sum(new[0]) - sum(old[0]) for new, old in zip(live, stored, strict=True)]
