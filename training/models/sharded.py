"""A model larger than one device: the ranks of a group share one copy (ZeRO-3), for passes without gradients."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from training.models import adapters
from training.models.loading import load_model
from training.models.recurrent_layers import recurrent_layers

MAX_LIVE_PARAMETERS = 10**9  # gathered parameters that a rank holds at a time, at most


@contextmanager
def sharded_model(folder: Path, adapter: Path | None, dtype: str) -> Iterator[Any]:
    """A sharded model for the duration of the block. Each pass is a collective: all ranks make equally many."""
    model, engine = load_sharded(folder, dtype, adapter)
    try:
        yield model
    finally:
        release(engine)


def load_sharded(
    folder: Path, dtype: str, adapter: Path | None = None, wrap: Callable[[Any], nn.Module] = lambda model: model
) -> tuple[Any, nn.Module]:
    """`wrap(model)` and the DeepSpeed engine around it; end the engine by `release`. A collective, as is each pass."""
    config = inference_config(dtype)
    with sharded_loading(config):
        model: Any = load_model(folder, dtype)
        wrapped = wrap(adapters.load_adapter(model, adapter) if adapter else model)
    gather_convolutions(wrapped)
    engine = start_inference(wrapped, config)
    # DeepSpeed learns the order of layers, to gather weights ahead, only from passes of the engine's own module.
    # A model makes passes of its own where it generates or returns logits.
    coordinator = engine.optimizer.get_param_coordinator()
    model.register_forward_pre_hook(lambda *_: coordinator.reset_step())
    return wrapped, engine


def inference_config(dtype: str) -> dict[str, Any]:
    """ZeRO-3 without an optimizer: ranks share one copy of the weights and gather a layer while they compute it."""
    zero = {
        "stage": 3,
        "stage3_max_live_parameters": MAX_LIVE_PARAMETERS,
        "stage3_max_reuse_distance": MAX_LIVE_PARAMETERS,
        "stage3_prefetch_bucket_size": MAX_LIVE_PARAMETERS // 10,
        "stage3_param_persistence_threshold": MAX_LIVE_PARAMETERS // 10**4,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
    }


@contextmanager
def sharded_loading(config: dict[str, Any]) -> Iterator[None]:
    """Under ZeRO-3, transformers loads only this rank's shard of each weight: no process holds the whole model."""
    if config["zero_optimization"]["stage"] < 3:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig

    from training.models.transformers_internals import forget_deepspeed_config

    reference = HfDeepSpeedConfig(config)  # transformers holds a weak reference to it alone
    try:
        yield
    finally:
        forget_deepspeed_config()
        del reference


def gather_convolutions(model: nn.Module) -> None:
    """Recurrent layers read the weights of their convolutions without calling them, so no hook would gather them."""
    from deepspeed.runtime.zero import register_external_parameter

    for layer in recurrent_layers(model):
        for convolution in (child for child in layer.children() if isinstance(child, nn.Conv1d)):
            for parameter in convolution.parameters():
                register_external_parameter(layer, parameter)


def start_inference(model: nn.Module, config: dict[str, Any]) -> Any:
    """An engine around a model that was loaded under `sharded_loading`. A collective."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model.requires_grad_(False), config=config)
    engine.eval()
    return engine


def release(engine: Any) -> None:
    """Free a sharded model's memory, so that another model can be loaded."""
    engine.destroy()
    gc.collect()


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks share one copy of the model, so that they must make equally many passes."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())
