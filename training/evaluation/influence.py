"""How training pairs act on held-out pairs (TracIn, arXiv 2002.08484), computed with forward passes.

TracIn's score of a training pair is the dot product of its gradient with that of the held-out pairs. A dot product with
a fixed vector is a directional derivative: how the training pair's margin changes if the weights move along the
held-out gradient. One backward pass over the held-out pairs and two forward passes over the training pairs, in packed
rows, therefore give the score of every pair.

The weights are those halfway between base model and policy. At the end of training the losses are saturated and most
gradients vanish; at the start nothing is learnt yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from training.models import adapters, weights
from training.objectives.metrics import pair_logps
from training.objectives.objective import Objective
from training.pairs.packing import build_row
from training.pairs.pair import Pair
from training.scoring.logps import row_logps

HALF = 0.5
STEP = 0.01  # of the weights' norm: far above rounding, and small enough for a derivative


@torch.no_grad()
def move_halfway(model: nn.Module, base: Path | None) -> dict[str, nn.Parameter]:
    """Move a policy halfway back to the base model; the trained parameters. `base` is None for an adapter."""
    if base is None:
        adapters.scale_adapter(model, HALF)
        return adapters.adapter_parameters(model)
    own = model.state_dict()
    for name, tensor in weights.read(base):
        if name in own:
            own[name].lerp_(tensor.to(own[name]), HALF)
    return dict(model.named_parameters())


@dataclass(frozen=True)
class MarginDerivatives:
    """Derivatives of reward margins with respect to the trained parameters of a model."""

    scorer: nn.Module
    objective: Objective
    parameters: Mapping[str, nn.Parameter]
    device: torch.device

    def gradient(self, pairs: Sequence[Pair], pair_weights: Sequence[float]) -> list[Tensor]:
        """Of the weighted sum of margins, with unit norm. Bounded memory: one pair at a time."""
        trained = [parameter.requires_grad_() for parameter in self.parameters.values()]
        total = [torch.zeros_like(parameter) for parameter in trained]
        for number, weight in enumerate(pair_weights):
            value = weight * self._margins(pairs, [number]).sum()
            for entry, part in zip(total, torch.autograd.grad(value, trained, allow_unused=True), strict=True):
                entry += 0.0 if part is None else part
        size = _norm(total) or 1.0
        return [part / size for part in total]

    @torch.no_grad()
    def along(self, direction: Sequence[Tensor], pairs: Sequence[Pair], rows: Sequence[Sequence[int]]) -> list[float]:
        """The derivative of each pair's margin along a direction. `rows` contain every pair number once."""
        trained = list(self.parameters.values())
        saved, step = [parameter.clone() for parameter in trained], STEP * _norm(trained)
        change = torch.zeros(len(pairs))
        for sign in (1.0, -1.0):
            for parameter, start, part in zip(trained, saved, direction, strict=True):
                parameter.copy_(start + sign * step * part)
            for row in rows:
                change[list(row)] += sign * self._margins(pairs, row).float().cpu()
        for parameter, start in zip(trained, saved, strict=True):
            parameter.copy_(start)
        return (change / (2 * step)).tolist()

    def _margins(self, pairs: Sequence[Pair], members: Sequence[int]) -> Tensor:
        """Of the pairs of one row, (pairs,)."""
        row = build_row(pairs, members).to(self.device)
        chosen, rejected = self.objective.rewards(pair_logps(row, row_logps(self.scorer, row), self.objective))
        return chosen - rejected


def _norm(tensors: Sequence[Tensor]) -> float:
    return sum(tensor.detach().float().square().sum().item() for tensor in tensors) ** 0.5
