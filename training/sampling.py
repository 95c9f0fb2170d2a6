"""Answers sampled in batches. Prompts come as token ids, so that what is sampled is what was trained on.

Each prompt draws from random numbers of its own: its answer depends neither on its neighbours in a batch nor on the
batch's size, and two models answer a prompt with the same draws, which makes their comparison less noisy.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from training.engine import is_split
from training.outputs import Answer

# A model's own generation config may say otherwise (Qwen's has a repetition penalty), and would say so silently.
PLAIN = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": None,
}


class OwnDraws(LogitsProcessor):
    """Nucleus sampling by inverse distribution: leaves possible only the token that each row's draw falls on."""

    def __init__(self, draws: Tensor, temperature: float, top_p: float) -> None:
        self.draws, self.temperature, self.top_p = draws, temperature, top_p  # draws: (rows, steps) in [0, 1)
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ranked, tokens = torch.softmax(scores.float() / self.temperature, -1).sort(dim=-1, descending=True, stable=True)
        below = ranked.cumsum(-1) - ranked  # probability before each token
        kept = torch.where(below < self.top_p, ranked, 0.0)
        at = self.draws[:, self.step, None].to(kept.device) * kept.sum(-1, keepdim=True)
        place = ((kept.cumsum(-1) <= at) & (kept > 0)).sum(-1, keepdim=True)
        place = torch.minimum(place, (kept > 0).sum(-1, keepdim=True) - 1)  # rounding at the upper end
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens.gather(-1, place), 0.0)


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
    """One answer per prompt; temperature 0 is greedy. The same seed gives the same answers.

    Ranks that share one copy of the model (training/split.py) each give prompts of their own, in as many batches.
    """
    model.eval()
    ends, together = _ends(model, tokenizer), is_split(model)
    answers: dict[int, Answer] = {}
    for members in _batches(prompts, batch_size):
        ids, mask = _left_padded([prompts[n] for n in members], _pad(tokenizer), next(model.parameters()).device)
        draws = torch.stack([_draws(prompts[n], seed, max_new_tokens) for n in members])
        own = [OwnDraws(draws, temperature, top_p)] if temperature > 0 else []
        output = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=_pad(tokenizer),
            eos_token_id=sorted(ends),
            logits_processor=LogitsProcessorList(own),
            synced_gpus=together,
            **PLAIN,
        )
        for number, row in zip(members, output[:, ids.shape[1] :].tolist(), strict=True):
            answers[number] = _answer(row, tokenizer, ends)
        report(len(answers))
    return [answers[number] for number in range(len(prompts))]


def _answer(ids: list[int], tokenizer: PreTrainedTokenizerBase, ends: set[int]) -> Answer:
    end = next((place for place, token in enumerate(ids) if token in ends), None)
    text = tokenizer.decode(ids[:end], skip_special_tokens=True)
    return Answer(str(text), tuple(ids if end is None else ids[: end + 1]), end is not None)


def _ends(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends an answer: chat models often name more than the tokenizer does."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = named if isinstance(named, list) else [named]
    return {token for token in [tokenizer.eos_token_id, *more] if isinstance(token, int)}


def _draws(prompt: Sequence[int], seed: int, count: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{','.join(map(str, prompt))}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand(count, generator=generator)


def _pad(tokenizer: PreTrainedTokenizerBase) -> int:
    assert isinstance(tokenizer.pad_token_id, int)
    return tokenizer.pad_token_id


def _left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Padding stands before the prompt and is masked, so that every answer continues its own prompt."""
    width = max(len(ids) for ids in prompts)
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def _batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Numbers of prompts, those of like length together: less padding, and no answer depends on it."""
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    return (order[start : start + size] for start in range(0, len(order), size))
