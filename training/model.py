"""Loading a causal language model and its tokenizer, and making it ready to be scored or trained."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from training.dtypes import DTYPES

logging.disable_progress_bar()  # of loading and saving weights; ours show the work


def load_model(folder: Path, dtype: str, device: torch.device | None = None) -> PreTrainedModel:
    """Weights as safetensors, no code from the folder, SDPA (which honours the row's mask), dropout off."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation="sdpa", use_safetensors=True, local_files_only=True
    )
    no_dropout(model)
    return model.to(device) if device else model  # type: ignore[arg-type]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def no_dropout(model: nn.Module) -> None:
    """Policy and reference must be the same function, so dropout is off in training too."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
