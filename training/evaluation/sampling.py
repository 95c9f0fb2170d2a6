"""Sample answers in batches. Prompts are token ids, so that a sampled prompt is exactly the one in the pairs.

Each prompt has its own random numbers. Its answer depends neither on the other prompts of a batch nor on the batch
size, and two models answer a prompt with the same draws, which makes their comparison less noisy.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from training.evaluation.samples import Answer, make_answer, prompt_digest
from training.models.ends import end_ids as ends_of
from training.models.sharded import is_sharded

# A model's generation config may set other values without notice: Qwen's has a repetition penalty.
GENERATION_DEFAULTS = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": None,
}


class SeededNucleus(LogitsProcessor):
    """Nucleus sampling by inverse distribution: leaves only the token that each row's draw falls on."""

    def __init__(self, draws: Tensor, temperature: float, top_p: float) -> None:
        self.draws, self.temperature, self.top_p = draws, temperature, top_p  # draws: (rows, steps) in [0, 1)
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ranked, tokens = torch.softmax(scores.float() / self.temperature, -1).sort(dim=-1, descending=True, stable=True)
        below = ranked.cumsum(-1) - ranked  # probability before each token
        kept = torch.where(below < self.top_p, ranked, 0.0)
        threshold = self.draws[:, self.step, None].to(kept.device) * kept.sum(-1, keepdim=True)
        index = ((kept.cumsum(-1) <= threshold) & (kept > 0)).sum(-1, keepdim=True)
        index = torch.minimum(index, (kept > 0).sum(-1, keepdim=True) - 1)  # rounding at the upper end
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens.gather(-1, index), 0.0)


@torch.no_grad()
def sample(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    batch_size: int = 50,
) -> list[Answer]:
    """One answer per prompt; temperature 0 is greedy. The same seed gives the same answers.

    Ranks that share one copy of the model (`is_sharded`) pass prompts of their own, in equally many batches.
    """
    model.eval()
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int)
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    end_ids, sharded = ends_of(tokenizer, configured, getattr(model, "config", None)), is_sharded(model)
    answers: dict[int, Answer] = {}
    for members in _length_batches(prompts, batch_size):
        ids, mask = _left_padded([prompts[n] for n in members], pad, next(model.parameters()).device)
        draws = torch.stack([_draws(prompts[n], seed, max_new_tokens) for n in members])
        processors = [SeededNucleus(draws, temperature, top_p)] if temperature > 0 else []
        output = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            eos_token_id=end_ids,
            logits_processor=LogitsProcessorList(processors),
            synced_gpus=sharded,
            **GENERATION_DEFAULTS,
        )
        for number, row in zip(members, output[:, ids.shape[1] :].tolist(), strict=True):
            answers[number] = make_answer(row, tokenizer, end_ids)
    return [answers[number] for number in range(len(prompts))]


def _draws(prompt: Sequence[int], seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(prompt_digest(prompt, seed)[:8], "big") >> 1)
    return torch.rand(count, generator=generator)


def _left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask; padding on the left, so that every answer continues its own prompt."""
    rows = [torch.tensor(list(ids), dtype=torch.int64) for ids in prompts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return ids.to(device), mask.to(device)


def _length_batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Numbers of prompts, batched by length for less padding."""
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    return (order[start : start + size] for start in range(0, len(order), size))
