"""Merge base and policy into one model on disk, and check that it still computes the same."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.evaluation.sampling import sample
from training.models import adapters, base_tensors
from training.models.dtypes import DTYPES
from training.models.loading import best_device, load_model
from training.models.sharded import sharded_model
from training.models.tokenizer import load_tokenizer

TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}  # of a logit; merging rounds each weight once
GREEDY_TOKENS = 16
# Largest mean KL of next tokens between the policy on a 4-bit base and the merged 16-bit model. 4 bits cost a few
# hundredths to tenths of a nat; above this limit the two are different models.
MAX_QUANTIZATION_KL = 1.0


class ModelChanged(ValueError):
    """The exported model differs from the trained one."""


@dataclass(frozen=True)
class Fingerprint:
    """A model's logits on real prompts, and one greedy answer with the logits of each of its tokens."""

    logits: list[Tensor]
    answer: tuple[int, ...]
    answer_logits: Tensor  # (answer tokens, vocabulary)
    embeddings: str  # tied | apart


def export(
    base: Path,
    policy: Path,
    adapter: bool,
    dtype: str,
    out: Path,
    shard_size: str,
    prompts: Sequence[Sequence[int]],
    split: bool = False,
) -> tuple[dict[str, Any], list[Tensor]]:
    """Write the merged model into `out`; returns the checks, and the logits that other formats must reproduce.

    Memory holds one model at a time and one shard of the output. With `split`, each rank calls this, holds its shard of
    the model, and rank 0 writes.
    """
    tokenizer, load = load_tokenizer(base), sharded_model if split else _unsharded_model
    weights: tuple[Path, Path | None] = (base, policy) if adapter else (policy, None)
    trained = _fingerprint(load, *weights, dtype, tokenizer, prompts)
    if not split or is_writer():
        adapters.write_merged(base, policy, out, DTYPES[dtype], shard_size)
        adapters.write_config(base, dtype, out)
        tokenizer.save_pretrained(out)
        base_tensors.copy_processor(base, out)
    if split:
        dist.barrier()
    written = _fingerprint(load, out, None, dtype, tokenizer, prompts)
    difference = _compare(trained, written, dtype, tokenizer)
    if trained.embeddings != written.embeddings:
        raise ModelChanged(
            f"input and output embeddings are {trained.embeddings} in the trained model, {written.embeddings} in the "
            "export"
        )
    _compare_tokenizers(tokenizer, load_tokenizer(out), prompts)
    untouched = base_tensors.check_complete(base, out)
    checks = {"largest_logit_difference": difference, "prompts": len(prompts), "reloaded": True, "same_tokenizer": True}
    checks |= {"untouched_tensors": untouched} if untouched else {}
    greedy = "same_greedy_text" if trained.answer == written.answer else "greedy_text_differs_at_a_tie"
    return {**checks, greedy: True, "embeddings": trained.embeddings}, written.logits


def is_writer() -> bool:
    """Whether this rank writes the files of a model that the ranks share."""
    return dist.get_rank() == 0


@contextmanager
def _unsharded_model(folder: Path, adapter: Path | None, dtype: str) -> Iterator[Any]:
    model: Any = load_model(folder, dtype, best_device())
    yield adapters.load_adapter(model, adapter) if adapter else model


def quantization_difference(
    base: Path, policy: Path, dtype: str, quantization: str, merged: Sequence[Tensor], prompts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """The distance of the merged model's logits from the evaluated policy, which has a quantized base."""
    model = adapters.load_adapter(load_model(base, dtype, best_device(), quantization), policy)
    difference = adapters.next_token_difference(adapters.prompt_logits(model, prompts), merged)
    if not difference["kl"] <= MAX_QUANTIZATION_KL:
        raise ModelChanged(
            f"the merged model is not the policy that was evaluated on the {quantization} base: the mean KL of their "
            f"next tokens is {difference['kl']:.3g}, and quantization explains at most {MAX_QUANTIZATION_KL}"
        )
    return difference


def _fingerprint(
    load: Callable[[Path, Path | None, str], AbstractContextManager[Any]],  # (model folder, adapter folder, dtype)
    folder: Path,
    adapter: Path | None,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
) -> Fingerprint:
    gc.collect()  # frees the previous model, which has reference cycles
    with load(folder, adapter, dtype) as model:
        model.eval()
        (answer,) = sample(model, tokenizer, prompts[:1], GREEDY_TOKENS, temperature=0.0, top_p=1.0, seed=0)
        (logits,) = adapters.prompt_logits(model, [[*prompts[0], *answer.ids]])
        embeddings = "tied" if _is_tied(model) else "apart"
        answer_logits = logits[len(prompts[0]) - 1 : -1]
        return Fingerprint(adapters.prompt_logits(model, prompts), answer.ids, answer_logits, embeddings)


def _compare(trained: Fingerprint, merged: Fingerprint, dtype: str, tokenizer: PreTrainedTokenizerBase) -> float:
    difference = adapters.largest_difference(trained.logits, merged.logits)
    if not difference <= TOLERANCE[dtype]:
        raise ModelChanged(
            f"the merged model is not the trained policy: its logits differ by {difference:.3g}, and rounding to "
            f"{dtype} explains at most {TOLERANCE[dtype]}"
        )
    if trained.answer != merged.answer and not _at_a_tie(trained, merged, difference):
        before, after = (tokenizer.decode(list(model.answer)) for model in (trained, merged))
        raise ModelChanged(f"the merged model answers '{after}' where the trained policy answers '{before}'")
    return difference


def _at_a_tie(trained: Fingerprint, merged: Fingerprint, difference: float) -> bool:
    """Whether the answers first differ at a token that rounding of the logits can decide."""
    position = next((n for n, (a, b) in enumerate(zip(trained.answer, merged.answer, strict=False)) if a != b), None)
    if position is None:
        return False
    first, second = trained.answer[position], merged.answer[position]
    return float(trained.answer_logits[position, first] - trained.answer_logits[position, second]) <= 2 * difference


def _compare_tokenizers(
    before: PreTrainedTokenizerBase, after: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]
) -> None:
    texts = [str(before.decode(list(ids))) for ids in prompts]
    same = after.get_vocab() == before.get_vocab() and after.chat_template == before.chat_template
    if not same or after(texts)["input_ids"] != before(texts)["input_ids"]:
        raise ModelChanged("the tokenizer or its chat template is not the base model's")


def _is_tied(model: PreTrainedModel) -> bool:
    output: Any = model.get_output_embeddings()
    inputs: Any = model.get_input_embeddings()
    return output is not None and output.weight is inputs.weight
