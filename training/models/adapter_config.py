"""Read an adapter's configuration. peft sees only the keys below: it imports modules and replaces layers for others."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from training.models.model_files import ADAPTER, read_object

LONGEST_PATTERN = 2000  # characters


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # no NaN


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_pattern(value: Any) -> bool:
    """Names of layers, or an expression that matches them."""
    return _are_names(value) or (isinstance(value, str) and len(value) <= LONGEST_PATTERN and _compiles(value))


def _compiles(expression: str) -> bool:
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _are_layers(value: Any) -> bool:
    return all(isinstance(n, int) and not isinstance(n, bool) for n in (value if isinstance(value, list) else [value]))


def _by_pattern(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(_is_pattern(k) and is_value(v) for k, v in value.items())


def _are_tokens(value: Any) -> bool:
    return _are_layers(value) or _by_pattern(_are_layers)(value)


HONOURED: dict[str, Callable[[Any], bool]] = {
    "r": _is_rank,
    "lora_alpha": _is_number,
    "lora_dropout": _is_number,
    "target_modules": _is_pattern,
    "exclude_modules": _is_pattern,
    "target_parameters": _are_names,
    "modules_to_save": _are_names,
    "layers_to_transform": _are_layers,
    "layers_pattern": _is_pattern,
    "rank_pattern": _by_pattern(_is_rank),
    "alpha_pattern": _by_pattern(_is_number),
    "trainable_token_indices": _are_tokens,
    "fan_in_fan_out": _is_flag,
    "bias": lambda value: value in ("none", "all", "lora_only"),
    "use_rslora": _is_flag,
    "use_dora": _is_flag,
    "lora_bias": _is_flag,
    "ensure_weight_tying": _is_flag,
    # Others split the base model's weights and leave a rest in them, which the base model's own files do not have.
    "init_lora_weights": lambda value: value in (True, False, "gaussian", "orthogonal"),
    "task_type": lambda value: value == "CAUSAL_LM",
    "peft_type": lambda value: value == "LORA",
}
# They describe where the adapter comes from and change nothing; `auto_mapping` names a class that peft would import.
IGNORED = ("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config")
DEFAULTS: dict[str, Any] = {"megatron_core": "megatron.core", "qalora_group_size": 16}


def adapter_options(folder: Path) -> dict[str, Any]:
    """Arguments of peft's LoraConfig; ValueError with one sentence for a key or value that is not honoured."""
    content = read_object(folder / ADAPTER[0])
    given = {key: value for key, value in content.items() if key not in IGNORED and not _has_no_effect(key, value)}
    if unknown := sorted(given.keys() - HONOURED.keys()):
        raise ValueError(
            f"{ADAPTER[0]} sets `{unknown[0]}`, which is not supported. Save a plain LoRA adapter, or merge it into "
            "its model with peft's `merge_and_unload`"
        )
    for key, value in given.items():
        if not HONOURED[key](value):
            raise ValueError(f"{ADAPTER[0]}: `{key}` cannot be {_short(value)}. Save a plain LoRA adapter with peft")
    if absent := sorted({"peft_type", "r"} - given.keys()):
        raise ValueError(f"{ADAPTER[0]} lacks `{absent[0]}`. Save a plain LoRA adapter with peft")
    if not given.keys() & {"target_modules", "target_parameters"}:
        raise ValueError(f"{ADAPTER[0]} lacks `target_modules`. Save a plain LoRA adapter with peft")
    _check_rank(folder, max([given["r"], *given.get("rank_pattern", {}).values()]))
    return {key: value for key, value in given.items() if key != "peft_type"}


def _has_no_effect(key: str, value: Any) -> bool:
    """peft writes all of its keys, and newer versions have more; `false` has an effect where the default is true."""
    return value in (None, [], {}) or (key not in HONOURED and value in (False, DEFAULTS.get(key, False)))


def _check_rank(folder: Path, rank: int) -> None:
    """peft makes matrices of this rank before it looks at those in the file."""
    try:
        with safe_open(folder / ADAPTER[1], "np") as file:
            largest = max((max(file.get_slice(name).get_shape(), default=0) for name in file.keys()), default=0)  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{ADAPTER[1]} is no safetensors file or was cut off ({error}). Fetch it again") from None
    if rank > largest:
        raise ValueError(f"{ADAPTER[0]} has the rank {rank}, but no tensor of {ADAPTER[1]} has. Fetch both again")


def _short(value: Any) -> str:
    return text if len(text := repr(value)) <= 60 else f"{text[:60]}..."
