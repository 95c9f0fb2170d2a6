"""Detect models that need Python code from their own folder or from the hub. The pipeline never runs such code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.models.model_files import CONFIGURATION, read_object

KERNEL_KEY = re.compile(r"_implementation|kernel")  # attn_implementation, experts_implementation, kernel_config, ...
COUNT_KEY = re.compile(r"(layers?|blocks|experts|depth|labels)$")
LARGEST_COUNT = 10_000  # transformers makes a module or an entry of a list for each
REDIRECTS = ("configuration_files", "transformers_weights")


def needs_remote_code(folder: Path) -> str | None:
    """The part of a model that needs code from its folder; None if transformers has all classes."""
    import transformers  # takes a second, and servers that only call `check_configuration` have no use for it

    config, tokenizer = _read(folder / "config.json"), _read(folder / "tokenizer_config.json")
    if config.get("auto_map") and str(config.get("model_type")) not in transformers.CONFIG_MAPPING:
        return f"the architecture `{config.get('model_type', 'without a name')}`"
    if tokenizer.get("auto_map") and not hasattr(transformers, str(tokenizer.get("tokenizer_class"))):
        return f"the tokenizer `{tokenizer.get('tokenizer_class', 'without a name')}`"
    return None


def check_configuration(folder: Path) -> None:
    """ValueError for a configuration that must not even be resolved: transformers would run code or not come back."""
    for path in (folder / name for name in CONFIGURATION):
        content = read_object(path) if path.is_file() else {}
        if redirects := [key for key in REDIRECTS if content.get(key) is not None]:
            raise ValueError(
                f"{path}: `{redirects[0]}` names other files to use instead of the usual ones, which are not read. "
                "Delete the key, and give the files their usual names"
            )
        reject_hub_kernels(content, path)
        for key, value in _values(content):
            if value != value:
                raise ValueError(f"{path}: `{key}` is NaN, no number. Correct it")
            if COUNT_KEY.search(key) and isinstance(value, int | float) and value > LARGEST_COUNT:
                raise ValueError(f"{path}: `{key}` is {value}, and at most {LARGEST_COUNT} are possible. Correct it")


def reject_hub_kernels(content: Any, path: Path) -> None:
    """ValueError if a configuration names a kernel on the hub, which transformers would download and run.

    `content` is a file's object, or the configuration as transformers resolved it with all its parts.
    """
    for key, value in _values(content):
        if KERNEL_KEY.search(key) and isinstance(value, str) and "/" in value:
            raise ValueError(
                f"{path}: `{key}` names the kernel {value}, which would be downloaded and run. Delete the key, or set "
                "it to eager or sdpa"
            )


def _values(content: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    """Each value with its key; keys of nested objects (parts of a model) are joined by dots."""
    content = vars(content) if hasattr(content, "to_dict") else content
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in pairs:
            yield from _values(value, f"{parent}.{key}" if parent else str(key))
    else:
        yield parent, content


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
