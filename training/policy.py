"""The policy: loaded, adapted and made ready for training; and written whole, as an adapter or as a model."""

import os
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from training import adapters, engine, weights
from training.model import load_model
from training.settings import Settings


def build_policy(settings: Settings, device: torch.device) -> nn.Module:
    # ZeRO-3 places the shards itself.
    place = None if settings.zero_stage == 3 else device
    model: Any = load_model(Path(settings.model), settings.dtype, place, settings.quantization)
    if settings.adapter:
        model = adapters.add_adapter(model, **settings.adapter, seed=settings.seed)
        model.enable_input_require_grads()  # all layers alike, so that one compiled graph serves them
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def save_policy(model: nn.Module, settings: Settings, name: str) -> None:
    """The adapter, or the whole model, into a folder of that name; there whole or not at all. A collective.

    Of a whole model no rank has more than its shard and a file of the new one in memory.
    """
    aside, target = Path(settings.folder) / f".{name}", Path(settings.folder) / name
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad or not settings.adapter]
    tensors = engine.gathered(parameters)
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        if settings.adapter:
            adapters.save_adapter(model, dict(tensors), aside, settings.model_name)  # type: ignore[arg-type]
        else:
            _save_model(model, tensors, aside)
        os.rename(aside, target)
    deque(tensors, maxlen=0)
    dist.barrier()


def _save_model(model: Any, tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """As `save_pretrained` does, but tensor by tensor, unless files name the weights otherwise than modules do."""
    shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in model.named_parameters()}
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if revert_weight_conversion(model, empty).keys() != shapes.keys():
        model.save_pretrained(folder, state_dict=dict(tensors))
        return
    folder.mkdir()
    weights.write(tensors, folder, adapters.SHARD)
    model.config.architectures, model.config.dtype = [type(model).__name__], model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
