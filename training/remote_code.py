"""Models that bring Python of their own. It is never run: transformers has the architecture itself, or we refuse."""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING


def needs_its_own_code(folder: Path) -> str | None:
    """What of a model's folder works with its own code alone; None where transformers' own classes do."""
    config, words = _read(folder / "config.json"), _read(folder / "tokenizer_config.json")
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        return f"the architecture `{config.get('model_type', 'without a name')}`"
    if words.get("auto_map") and not hasattr(transformers, str(words.get("tokenizer_class"))):
        return f"the tokenizer `{words.get('tokenizer_class', 'without a name')}`"
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
