"""Detect models that need Python code from their own folder or from the hub. The pipeline never runs such code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

KERNEL_KEY = re.compile(r"_implementation|kernel")  # attn_implementation, experts_implementation, kernel_config, ...


def needs_remote_code(folder: Path) -> str | None:
    """The part of a model that needs code from its folder; None if transformers has all classes."""
    config, tokenizer = _read(folder / "config.json"), _read(folder / "tokenizer_config.json")
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        return f"the architecture `{config.get('model_type', 'without a name')}`"
    if tokenizer.get("auto_map") and not hasattr(transformers, str(tokenizer.get("tokenizer_class"))):
        return f"the tokenizer `{tokenizer.get('tokenizer_class', 'without a name')}`"
    return None


def reject_hub_kernels(folder: Path) -> None:
    """ValueError if config.json names a kernel on the hub, which transformers would download and run."""
    for key, value in _values(_read(folder / "config.json")):
        if KERNEL_KEY.search(key) and isinstance(value, str) and "/" in value:
            raise ValueError(
                f"{folder / 'config.json'}: `{key}` names the kernel {value}, which would be downloaded and run. "
                "Delete the key, or set it to eager or sdpa"
            )


def _values(content: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    """Each value with its key; keys of nested objects (parts of a model) are joined by dots."""
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in pairs:
            yield from _values(value, f"{parent}.{key}" if parent else str(key))
    else:
        yield parent, content


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
