"""Load a causal language model, without dropout."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from training.models.dtypes import DTYPES
from training.models.fp8 import use_fp8
from training.models.model_files import loadable
from training.models.remote_code import check_configuration, reject_hub_kernels

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")  # of a generation config

logging.disable_progress_bar()  # of loading and saving weights; the stages have progress bars of their own


def load_config(folder: Path) -> PreTrainedConfig:
    """The resolved configuration; ValueError if it asks for code of the hub."""
    check_configuration(folder)
    with loadable(folder) as files:
        config = AutoConfig.from_pretrained(files, local_files_only=True, trust_remote_code=False)
    reject_hub_kernels(config, folder / "config.json")
    return config


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model on the meta device, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def load_model(
    folder: Path, dtype: str, device: torch.device | None = None, quantization: str | None = None
) -> PreTrainedModel:
    """Reads safetensors only, runs no code from the folder, disables dropout. ValueError if a tensor is missing.

    `quantization` is None, `nf4` (4-bit weights, slow on a CPU) or `fp8` (8-bit matrix products, emulated on a CPU).
    """
    options: dict[str, Any] = {}
    if quantization == "nf4":
        options |= {"quantization_config": _nf4_config(dtype), "device_map": {"": device or "cpu"}}
    model = load_weights(AutoModelForCausalLM, folder, DTYPES[dtype], **options)
    # Its other values would change answers without notice, and some neither generate nor save: only tokens are kept.
    model.generation_config = GenerationConfig(
        **{name: getattr(model.generation_config, name, None) for name in TOKENS}
    )
    disable_dropout(model)
    if device and quantization != "nf4":
        model.to(device)
    if quantization == "fp8":
        use_fp8(model, dtype)
    return model


def load_weights(kind: Any, folder: Path, dtype: torch.dtype | str, **options: Any) -> Any:
    """A model of this auto class with all of its weights: transformers would draw those that no file has."""
    options |= {"config": load_config(folder), "dtype": dtype, "use_safetensors": True, "local_files_only": True}
    with loadable(folder) as files:
        try:
            model, report = kind.from_pretrained(files, trust_remote_code=False, output_loading_info=True, **options)
        except ImportError as error:  # of its quantization or attention
            problem = str(error).strip().splitlines()[0].rstrip(".")
            raise ValueError(f"{problem}. Install the package, or choose the model in bfloat16") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(missing_tensors(missing, type(model).__name__))
    model.name_or_path = model.config.name_or_path = str(folder)  # peft looks there for the model's configuration
    return model


def missing_tensors(names: Sequence[str], model: str) -> str:
    return (
        f"its files lack {len(names)} tensors of {model}, such as {names[0]}, and random numbers would take their "
        "place. Fetch the model again"
    )


def _nf4_config(dtype: str) -> BitsAndBytesConfig:
    if find_spec("bitsandbytes") is None:
        raise ValueError("quantization: nf4 needs `pip install bitsandbytes`: install it, or set it to null")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[dtype],
    )


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout probabilities to 0: a policy in training mode must be the same function as its reference.

    Architectures keep the probabilities in modules, in attributes for functional calls, and in configurations.
    training/trainer/start_checks.py checks at start-up that none is active.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _zero_dropout(module)
    for config in {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}.values():
        _zero_dropout(config)


def dropout_attributes(owner: Any) -> list[str]:
    """Names of attributes with a probability of dropout (dropout, pdrop, layerdrop) or jitter."""
    numbers = [name for name, value in vars(owner).items() if type(value) in (int, float) and value]
    return [name for name in numbers if re.search("drop|jitter", name)]


def _zero_dropout(owner: Any) -> None:
    for name in dropout_attributes(owner):
        setattr(owner, name, 0.0)


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
