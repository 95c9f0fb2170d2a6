"""The policy: loaded, adapted and made ready for training; and written whole, as an adapter or as a model."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training import adapters, engine
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
    """The adapter, or the whole model, into a folder of that name; there whole or not at all. A collective."""
    aside, target = Path(settings.folder) / f".{name}", Path(settings.folder) / name
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad or not settings.adapter]
    state = engine.gathered(parameters)
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        if settings.adapter:
            adapters.save_adapter(model, state, aside, settings.model_name)  # type: ignore[arg-type]
        else:
            model.save_pretrained(aside, state_dict=state)  # type: ignore[operator]
        os.rename(aside, target)
    dist.barrier()
