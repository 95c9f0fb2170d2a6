"""Load a tokenizer. Stages that need no model import this alone: the code of models takes seconds to import."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training.models.model_files import loadable


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """With a padding token."""
    tokenizer = read_tokenizer(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    with loadable(folder) as files:
        return AutoTokenizer.from_pretrained(files, local_files_only=True, trust_remote_code=False)
