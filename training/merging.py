"""From base and policy to one model on disk, with proof at each step that it is still the same model."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training import adapters
from training.dtypes import DTYPES
from training.model import best_device, load_model, load_tokenizer
from training.sampling import sample
from training.split import split_model

TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}  # of a logit: merging rounds each weight once
GREEDY_TOKENS = 16
# Mean KL of next tokens between the policy on a 4-bit base and the merged 16-bit model. 4 bits cost a few hundredths to
# tenths of a nat; above this the two are different models.
MOST_QUANTIZATION_KL = 1.0


Load = Callable[[Path, Path | None, str], AbstractContextManager[Any]]  # a folder, an adapter's, a precision


class Changed(ValueError):
    """What was written is not what was trained."""


@dataclass(frozen=True)
class Proof:
    """What a model says: logits on real prompts, and one greedy answer with the logits behind each of its tokens."""

    logits: list[Tensor]
    words: tuple[int, ...]
    choices: Tensor  # (words, vocabulary)


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
    """Write the merged model into `out`; what was checked, and the logits that any other format must give.

    In memory is one model at a time, or this rank's part of it (`split`, then each rank calls this and the first
    writes), and one shard of what is written.
    """
    tokenizer, load = load_tokenizer(base), split_model if split else _whole_model
    weights: tuple[Path, Path | None] = (base, policy) if adapter else (policy, None)
    trained, tied = _proof_of(load, *weights, dtype, tokenizer, prompts)
    if not split or writes():
        adapters.write_merged(*weights, out, DTYPES[dtype], shard_size)
        adapters.write_config(base, dtype, out)
        tokenizer.save_pretrained(out)
    if split:
        dist.barrier()
    written, still_tied = _proof_of(load, out, None, dtype, tokenizer, prompts)
    difference = _compare(trained, written, dtype, tokenizer)
    if tied != still_tied:
        raise Changed("input and output embeddings were tied in the base model and are not any more, or became so")
    _compare_tokenizers(tokenizer, load_tokenizer(out), prompts)
    checks = {"largest_logit_difference": difference, "prompts": len(prompts), "reloaded": True, "same_tokenizer": True}
    greedy = "same_greedy_text" if trained.words == written.words else "greedy_text_differs_at_a_tie"
    return {**checks, greedy: True, "embeddings": "tied" if tied else "apart"}, written.logits


def writes() -> bool:
    """Of the ranks that share a model, the one that writes its files."""
    return dist.get_rank() == 0


def _proof_of(
    load: Load,
    folder: Path,
    adapter: Path | None,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
) -> tuple[Proof, bool]:
    """What the model says, and whether its embeddings are tied."""
    gc.collect()  # the model before, whose parts refer to each other
    with load(folder, adapter, dtype) as model:
        return prove(model, tokenizer, prompts), _is_tied(model)


@contextmanager
def _whole_model(folder: Path, adapter: Path | None, dtype: str) -> Iterator[Any]:
    model: Any = load_model(folder, dtype, best_device())
    yield adapters.load_adapter(model, adapter) if adapter else model


def quantization_difference(
    base: Path, policy: Path, dtype: str, quantization: str, merged: Sequence[Tensor], prompts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """How far the merged model's logits are from the policy that was trained and evaluated, on its quantized base."""
    model = adapters.load_adapter(load_model(base, dtype, best_device(), quantization), policy)
    found = adapters.next_token_difference(adapters.logits_of(model, prompts), merged)
    if not found["kl"] <= MOST_QUANTIZATION_KL:
        raise Changed(
            f"the merged model is not the policy that was evaluated on the {quantization} base: the mean KL of their "
            f"next tokens is {found['kl']:.3g}, and quantization explains {MOST_QUANTIZATION_KL} at most"
        )
    return found


def prove(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]) -> Proof:
    model.eval()
    answer = sample(model, tokenizer, prompts[:1], GREEDY_TOKENS, temperature=0.0, top_p=1.0, seed=0)[0]
    (along,) = adapters.logits_of(model, [[*prompts[0], *answer.ids]])
    return Proof(adapters.logits_of(model, prompts), answer.ids, along[len(prompts[0]) - 1 : -1])


def _compare(trained: Proof, merged: Proof, dtype: str, tokenizer: PreTrainedTokenizerBase) -> float:
    difference = adapters.largest_difference(trained.logits, merged.logits)
    if not difference <= TOLERANCE[dtype]:
        raise Changed(
            f"the merged model is not the trained policy: its logits differ by {difference:.3g}, and rounding to "
            f"{dtype} explains {TOLERANCE[dtype]} at most"
        )
    if trained.words != merged.words and not _at_a_tie(trained, merged, difference):
        before, after = (tokenizer.decode(list(proof.words)) for proof in (trained, merged))
        raise Changed(f"the merged model answers '{after}' where the trained policy answers '{before}'")
    return difference


def _at_a_tie(trained: Proof, merged: Proof, difference: float) -> bool:
    """Whether the answers part at a token that the rounding of logits alone can decide."""
    place = next((n for n, (a, b) in enumerate(zip(trained.words, merged.words, strict=False)) if a != b), None)
    if place is None:
        return False
    first, second = trained.words[place], merged.words[place]
    return float(trained.choices[place, first] - trained.choices[place, second]) <= 2 * difference


def _compare_tokenizers(
    before: PreTrainedTokenizerBase, after: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]
) -> None:
    texts = [str(before.decode(list(ids))) for ids in prompts]
    same = after.get_vocab() == before.get_vocab() and after.chat_template == before.chat_template
    if not same or after(texts)["input_ids"] != before(texts)["input_ids"]:
        raise Changed("the tokenizer or its chat template is not the base model's")


def _is_tied(model: PreTrainedModel) -> bool:
    head: Any = model.get_output_embeddings()
    body: Any = model.get_input_embeddings()
    return head is not None and head.weight is body.weight
