"""Models that bring Python of their own. It is never run: transformers has the architecture itself, or we refuse."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

KERNEL_KEY = re.compile(r"_implementation|kernel")  # attn_implementation, experts_implementation, kernel_config, ...


def needs_its_own_code(folder: Path) -> str | None:
    """What of a model's folder works with its own code alone; None where transformers' own classes do."""
    config, words = _read(folder / "config.json"), _read(folder / "tokenizer_config.json")
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        return f"the architecture `{config.get('model_type', 'without a name')}`"
    if words.get("auto_map") and not hasattr(transformers, str(words.get("tokenizer_class"))):
        return f"the tokenizer `{words.get('tokenizer_class', 'without a name')}`"
    return None


def refuse_kernels(folder: Path) -> None:
    """ValueError where config.json names code of the hub: transformers would download a kernel and run it."""
    for key, value in _named(_read(folder / "config.json")):
        if KERNEL_KEY.search(key) and isinstance(value, str) and "/" in value:
            raise ValueError(
                f"{folder / 'config.json'}: `{key}` names the kernel {value}, which would be downloaded and run. "
                "Delete the key, or set it to eager or sdpa"
            )


def _named(content: Any, below: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its key; values of a nested object (one for each part of a model) keep the object's key too."""
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in pairs:
            yield from _named(value, f"{below}.{key}" if below else str(key))
    else:
        yield below, content


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
