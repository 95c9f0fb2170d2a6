"""Less memory for long rows: activations that the backward pass computes again instead of keeping them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from training.models.transformers_internals import checkpoint_layers_with
from training.scoring.attention import LONG_ATTENTION


def recompute_layers(model: Any, offload: bool, kept: Any = LONG_ATTENTION) -> None:
    """Keep only the layers' inputs and the results of `kept`, long attention, which is most of a long row's work.

    With `offload`, the inputs are in host memory, and nothing else is kept. With `kept` None, only the inputs are.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not offload and not kept:
        return
    function = _offloaded if offload else partial(_keeping, kept)
    checkpoint_layers_with(model, function)


def _offloaded(layer: Any, *inputs: Any) -> Any:
    with save_on_cpu(pin_memory=torch.cuda.is_available()):  # pinned: the copies need no staging buffer
        return checkpoint(layer, *inputs, use_reentrant=False)


def _keeping(operation: Any, layer: Any, *inputs: Any) -> Any:
    """transformers passes a partial of the layer's forward, with the arguments of attention."""
    options: dict[str, Any] = {}
    if getattr(layer, "keywords", {}).get("row_calls"):
        options["context_fn"] = partial(create_selective_checkpoint_contexts, [operation])
    return checkpoint(layer, *inputs, use_reentrant=False, **options)


def tile_mlps(model: nn.Module, tokens: int) -> int:
    """Let MLPs compute `tokens` tokens of a row at a time, in the backward pass too. Returns the number of MLPs.

    An MLP's values between its projections are several times as wide as the hidden state: for a long row they are the
    largest tensors of a layer.
    """
    mlps: list[Any] = [module for module in model.modules() if type(module).__name__.endswith("MLP")]
    for mlp in mlps:
        mlp.forward = _tiled(mlp.forward, tokens)
    return len(mlps)


def _tiled(forward: Any, tokens: int) -> Any:
    def tiled(hidden: Tensor, *others: Any) -> Tensor:  # (..., tokens, size)
        if others or hidden.shape[-2] <= tokens:
            return forward(hidden, *others)
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in hidden.split(tokens, -2)], -2)

    return tiled
