"""Answers sampled in batches. Prompts come as token ids, so that what is sampled is what was trained on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int
    finished: bool  # ended by itself, and not by the limit


@torch.no_grad()
def sample(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    report: Callable[[int], None] = lambda done: None,
    batch_size: int = 50,
) -> list[Answer]:
    """One answer per prompt; temperature 0 is greedy. The same seed gives the same answers."""
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    how = sampling if temperature > 0 else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    model.eval()
    answers: list[Answer] = []
    for batch in _batches(prompts, batch_size):
        ids, mask = _left_padded(batch, tokenizer.pad_token_id, next(model.parameters()).device)
        output = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **how,
        )
        answers += [_answer(row.tolist(), tokenizer) for row in output[:, ids.shape[1] :]]
        report(len(answers))
    return answers


def _answer(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Answer:
    finished = tokenizer.eos_token_id in ids
    ids = ids[: ids.index(tokenizer.eos_token_id)] if finished else ids
    return Answer(str(tokenizer.decode(ids, skip_special_tokens=True)), len(ids), finished)


def _left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids in prompts)
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def _batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[Sequence[int]]]:
    return (prompts[start : start + size] for start in range(0, len(prompts), size))
