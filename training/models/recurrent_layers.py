"""The layers of a model that carry state from token to token."""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

CONVOLUTION = "causal_conv1d_fn"


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Layers with a causal convolution that we can let follow the segments of a row."""
    return [module for module in model.modules() if _has_convolution(module) and _takes_cache(type(module).forward)]


def _has_convolution(module: nn.Module) -> bool:
    return hasattr(sys.modules[type(module).__module__], CONVOLUTION) and any(
        isinstance(child, nn.Conv1d) for child in module.children()
    )


@cache
def _takes_cache(forward: Callable[..., Any]) -> bool:
    return not {"cache_params", "past_key_values"}.isdisjoint(inspect.signature(forward).parameters)
