"""How training pairs act on held-out pairs (TracIn, arXiv 2002.08484), computed with forward passes.

TracIn's score of a training pair is the dot product of its gradient with that of the held-out pairs. A dot product with
a fixed vector is a directional derivative: how the training pair's margin changes if the weights move along the
held-out gradient. One backward pass over the held-out pairs and forward passes of the training pairs in packed rows
therefore give the score of every pair, without a gradient per pair.

The weights are those halfway between base model and policy. At the end of training the losses are saturated and most
gradients vanish; at the start nothing is learnt yet.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from training.models import adapters, weights
from training.models.logps import row_logps
from training.objectives.metrics import pair_logps
from training.objectives.objective import Objective
from training.objectives.packing import Pair, build_row

Parameters = Mapping[str, nn.Parameter]
HALF = 0.5
STEP = 0.01  # of the weights' norm: far above rounding, and small enough for a derivative


@torch.no_grad()
def move_halfway(model: nn.Module, base: Path | None) -> Parameters:
    """Move a policy halfway back to the base model; the trained parameters. `base` is None for an adapter."""
    if base is None:
        adapters.scale_adapter(model, HALF)
        return adapters.adapter_parameters(model)
    own = model.state_dict()
    for name, tensor in weights.read(base):
        if name in own:
            own[name].lerp_(tensor.to(own[name]), HALF)
    return dict(model.named_parameters())


def margin_gradient(
    scorer: nn.Module,
    objective: Objective,
    pairs: Sequence[Pair],
    pair_weights: Sequence[float],
    parameters: Parameters,
    device: torch.device,
) -> list[Tensor]:
    """Gradient of the weighted sum of margins, with unit norm. Bounded memory: one pair at a time."""
    for parameter in parameters.values():
        parameter.requires_grad_()
    total = [torch.zeros_like(parameter) for parameter in parameters.values()]
    for number, weight in enumerate(pair_weights):
        value = weight * _margins(scorer, objective, pairs, [number], device).sum()
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        for entry, part in zip(total, found, strict=True):
            if part is not None:
                entry += part
    size = _norm(total)
    return [part / size for part in total] if size else total


@torch.no_grad()
def margin_changes(
    scorer: nn.Module,
    objective: Objective,
    pairs: Sequence[Pair],
    rows: Sequence[Sequence[int]],
    parameters: Parameters,
    direction: Sequence[Tensor],
    device: torch.device,
) -> list[float]:
    """The derivative of each pair's margin along the direction. `rows` contain every pair number once."""
    step = STEP * _norm(list(parameters.values()))
    columns: list[dict[int, float]] = []
    for distance in (step, -step):
        columns.append({})
        with _moved(parameters, direction, distance):
            for row in rows:
                values = _margins(scorer, objective, pairs, row, device).tolist()
                columns[-1] |= dict(zip(row, values, strict=True))
    forwards, backwards = columns
    return [(forwards[n] - backwards[n]) / (2 * step) for n in range(len(pairs))]


def _margins(
    scorer: nn.Module, objective: Objective, pairs: Sequence[Pair], members: Sequence[int], device: torch.device
) -> Tensor:
    """The reward margins of one row's pairs, (pairs,)."""
    row = build_row(pairs, members).to(device)
    chosen, rejected = objective.rewards(pair_logps(row, row_logps(scorer, row), objective))
    return chosen - rejected


@contextmanager
def _moved(parameters: Parameters, direction: Sequence[Tensor], distance: float) -> Iterator[None]:
    """Move the weights, and restore their exact values afterwards."""
    saved = [parameter.detach().clone() for parameter in parameters.values()]
    for parameter, part in zip(parameters.values(), direction, strict=True):
        parameter.data.add_(part, alpha=distance)
    try:
        yield
    finally:
        for parameter, value in zip(parameters.values(), saved, strict=True):
            parameter.data.copy_(value)


def _norm(tensors: Sequence[Tensor]) -> float:
    return sum(tensor.detach().float().square().sum().item() for tensor in tensors) ** 0.5
