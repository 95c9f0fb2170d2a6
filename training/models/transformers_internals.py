"""What we read or set in transformers without a public interface for it, and why.

tests/models/test_transformers_internals.py fails if an upgrade moves or changes any of it. Documented classes are
imported where they are used.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

# How tensors of the files become parameters, and back: `save_pretrained` does it with whole models alone, and we
# convert tensor by tensor.
from transformers.conversion_mapping import get_model_conversion_mapping as get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter as WeightConverter
from transformers.core_model_loading import WeightRenaming as WeightRenaming
from transformers.core_model_loading import rename_source_key as rename_source_key
from transformers.core_model_loading import revert_weight_conversion as revert_weight_conversion


def attention_of(model: PreTrainedModel) -> str:
    """The name that `set_attn_implementation` takes: there is a public setter and no getter."""
    return str(model.config._attn_implementation)


def unsplit_modules(model: PreTrainedModel) -> set[str]:
    """Class names of the decoder layers, which transformers keeps on one device."""
    return set(model._no_split_modules or ())


def float32_modules(model: PreTrainedModel, dtype: torch.dtype | None) -> set[str]:
    """Names of modules that transformers keeps in float32 when it loads the others in 16 bits."""
    names = set(model._keep_in_fp32_modules_strict or ())
    return names | set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else names


def checkpoint_layers_with(model: PreTrainedModel, function: Callable[..., Any]) -> None:
    """Let layers recompute by `function`: `gradient_checkpointing_enable` takes options of torch's function alone."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = function  # type: ignore[assignment]


def known_caches() -> Collection[str]:
    """Values of `cache_implementation`, to refuse others before anything is loaded."""
    from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

    return ALL_CACHE_IMPLEMENTATIONS


def known_quantizations() -> Mapping[str, Any]:
    """Methods in a configuration's `quantization_config`, for the same reason."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return AUTO_QUANTIZATION_CONFIG_MAPPING


def forget_deepspeed_config() -> None:
    """The end of what `HfDeepSpeedConfig` begins. It is a weak reference, and garbage is collected when it likes."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
