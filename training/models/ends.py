"""The tokens that end an answer: one answer to this for prepare, sampling, vLLM and the Modelfile."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from training.models.model_files import loadable, read_object


def end_ids(tokenizer: Any, generation: Any, config: Any) -> list[int]:
    """Sorted ids: the tokenizer's EOS, and what the model's configuration names, which is often more.

    `generation` is what the generation config has as `eos_token_id`. Where it has nothing, the configuration counts, or
    the one of the text model in it.
    """
    text = config.get_text_config(decoder=True) if config is not None else None
    named = (generation, getattr(config, "eos_token_id", None), getattr(text, "eos_token_id", None))
    configured: Any = next((ids for ids in named if ids is not None), [])
    ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    return sorted({token for token in ids if isinstance(token, int) and token >= 0})  # -1 stands for none


def end_ids_of(tokenizer: Any, folder: Path) -> list[int]:
    """The same for the model in a folder."""
    generation = folder / "generation_config.json"
    configured = read_object(generation).get("eos_token_id") if generation.is_file() else None
    with loadable(folder) as files:
        config = AutoConfig.from_pretrained(files, local_files_only=True, trust_remote_code=False)
    return end_ids(tokenizer, configured, config)
