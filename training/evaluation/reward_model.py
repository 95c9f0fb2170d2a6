"""A reward model, or any sequence classifier, as a judge: one score for a prompt and its answer."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from training.models.chat import render
from training.models.dtypes import DTYPES
from training.models.loading import load_weights
from training.models.tokenizer import load_tokenizer

BATCH = 16  # exchanges


@torch.no_grad()
def scores(
    folder: Path,
    label: str | None,
    exchanges: Sequence[tuple[str, str]],
    dtype: str,
    device: torch.device,
) -> list[float]:
    """Scores of (prompt, answer) texts: the logit of a one-label model, or the log-probability of `label`."""
    model, tokenizer = load(folder, dtype, device)
    index = _label_index(model.config, label)
    values: list[float] = []
    for start in range(0, len(exchanges), BATCH):
        batch = tokenizer(
            [_text(tokenizer, *exchange) for exchange in exchanges[start : start + BATCH]],
            padding=True,
            truncation=True,
            add_special_tokens=not tokenizer.chat_template,  # the template writes them
            max_length=min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 4096)),
            return_tensors="pt",
        ).to(device)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        values += (logits[:, 0] if index is None else logits.log_softmax(-1)[:, index]).tolist()
    return values


@lru_cache(maxsize=1)
def load(folder: Path, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """Model and tokenizer, cached for the next call."""
    tokenizer = load_tokenizer(folder)
    model = load_weights(AutoModelForSequenceClassification, folder, DTYPES[dtype])
    model.to(device).eval()
    model.config.pad_token_id = tokenizer.pad_token_id  # the model scores the last token that is not padding
    return model, tokenizer


def _text(tokenizer: Any, prompt: str, answer: str) -> str:
    if not tokenizer.chat_template:
        return f"{prompt}\n\n{answer}"
    exchange = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return render(tokenizer, exchange)


def _label_index(config: Any, label: str | None) -> int | None:
    """The index of the logit to use, None for a one-label model; ValueError if `label` does not name one."""
    names = [str(config.id2label[number]) for number in range(config.num_labels)]
    if config.num_labels == 1 and label is None:
        return None
    if label not in names:
        raise ValueError(
            f"the reward model has the labels {', '.join(names)}, and evaluate.reward_model.label is "
            f"{label or 'not set'}. Set it to one of them"
        )
    return names.index(label)
