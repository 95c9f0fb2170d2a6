"""Load a policy whose layers the ranks of a group share, and check its values against the whole model's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.distributed.tensor_parallel import TensorGroup, split_layers
from training.models.loading import empty_model, load_config
from training.pairs.pair import Pair
from training.pairs.pair_columns import shortest
from training.scoring.logps import Scorer, logp_tolerance, plain_logps, rounding_noise
from training.scoring.parity import shorten


def load_split(
    folder: Path, load: Callable[[], nn.Module], group: TensorGroup, probe: Pair, device: torch.device | None
) -> tuple[nn.Module, Tensor]:
    """This rank's part of the model that `load` reads into host memory, and the whole model's values of the probe.

    The values are those of the group's first rank. ValueError on all ranks if the model cannot be split. A collective.
    """
    split_layers(empty_model(load_config(folder)), group)
    result: Any = None
    for turn in range(group.size):  # a node has memory for one whole model, not for one per rank
        if turn == group.rank:
            try:
                result = _load_part(load, group, probe, device)
            except ValueError as error:  # each rank meets it in its turn
                result = error
        dist.barrier()
    if isinstance(result, ValueError):
        raise result
    return result


def _load_part(
    load: Callable[[], nn.Module], group: TensorGroup, probe: Pair, device: torch.device | None
) -> tuple[nn.Module, Tensor]:
    model = load()
    expected = probe_logps(model, probe, torch.device("cpu")) if group.rank == 0 else torch.tensor(0.0)
    split_layers(Scorer(model).causal, group)
    return model.to(device) if device else model, expected


def make_probe(pairs: Sequence[Pair]) -> Pair:
    """The part of a pair that whole and split model are compared on: the whole one computes it on the CPU."""
    return shorten(shortest(pairs))


@torch.no_grad()
def probe_logps(model: nn.Module, probe: Pair, device: torch.device) -> Tensor:
    training = model.training
    try:
        return plain_logps(model.eval(), probe.prompt_ids, probe.chosen_ids, device)
    finally:
        model.train(training)


def check_split(model: nn.Module, group: TensorGroup, probe: Pair, expected: Tensor, device: torch.device) -> None:
    """ValueError on all ranks if the parts give other values of the probe than the whole model. A collective."""
    name = type(Scorer(model).causal).__name__
    try:
        values = probe_logps(model, probe, device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of shapes that do not fit
        raise ValueError(f"actor_train.tensor_parallel {group.size} fails in {name} ({error}). Set it to 1") from error
    own = (values - expected.to(device)).abs().mean().nan_to_num(torch.inf)
    change = group.sum(own if group.rank == 0 else torch.zeros_like(own)).item()  # of the first rank
    if change > logp_tolerance(model) and change > logp_tolerance(model, rounding_noise(model, [probe], device)):
        raise ValueError(
            f"actor_train.tensor_parallel {group.size} changes the log-probabilities of {name} by {change:.2g} a "
            "token: transformers' plan to split it is wrong for this model. Set it to 1"
        )
