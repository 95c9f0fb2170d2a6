"""From base and policy to one model on disk, with proof at each step that it is still the same model."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from training import adapters
from training.model import best_device, load_model, load_tokenizer, restore_dropout
from training.sampling import sample

TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}  # of a logit: merging rounds each weight once
GREEDY_TOKENS = 16
# Mean KL of next tokens between the policy on a 4-bit base and the merged 16-bit model. 4 bits cost a few hundredths to
# tenths of a nat; above this the two are different models.
MOST_QUANTIZATION_KL = 1.0


class Changed(ValueError):
    """What was written is not what was trained."""


@dataclass(frozen=True)
class Proof:
    """What a model says: logits on real prompts, and one greedy answer with the logits behind each of its tokens."""

    logits: list[Tensor]
    words: tuple[int, ...]
    choices: Tensor  # (words, vocabulary)


def export(
    base: Path, policy: Path, adapter: bool, dtype: str, out: Path, shard: str, prompts: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], list[Tensor]]:
    """Write the merged model into `out`; what was checked, and the logits that any other format must give."""
    tokenizer = load_tokenizer(base)
    model: Any = load_model(base, dtype)
    generation, tied = model.generation_config, _is_tied(model)
    model = adapters.load_adapter(model, policy) if adapter else load_model(policy, dtype)
    trained = prove(model, tokenizer, prompts)
    model = adapters.merge(model) if adapter else model
    merged = prove(model, tokenizer, prompts)
    difference = _compare(trained, merged, dtype, tokenizer)
    model.generation_config = generation
    restore_dropout(model.config, AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False))
    model.save_pretrained(out, max_shard_size=shard)
    tokenizer.save_pretrained(out)
    del model
    gc.collect()
    _reloads(out, dtype, merged, tokenizer, generation, tied, prompts)
    checks = {"largest_logit_difference": difference, "prompts": len(prompts), "reloaded": True, "same_tokenizer": True}
    greedy = "same_greedy_text" if trained.words == merged.words else "greedy_text_differs_at_a_tie"
    return {**checks, greedy: True, "embeddings": "tied" if tied else "apart"}, merged.logits


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


def _reloads(
    out: Path,
    dtype: str,
    merged: Proof,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
    tied: bool,
    prompts: Sequence[Sequence[int]],
) -> None:
    """Read back from disk it must be the merged model, to the bit of a logit."""
    model, again = load_model(out, dtype), load_tokenizer(out)
    found = prove(model, again, prompts)
    difference = adapters.largest_difference(merged.logits, found.logits)
    if not difference <= TOLERANCE["float32"] or merged.words != found.words:
        raise Changed(
            f"the model that was read back is not the one that was written: logits differ by {difference:.3g}"
        )
    if _is_tied(model) != tied:
        raise Changed("input and output embeddings were tied in the base model and are not any more, or became so")
    if _plain(model.generation_config) != _plain(generation):
        raise Changed("the generation config is not the base model's")
    texts = [str(tokenizer.decode(list(ids))) for ids in prompts]
    same = again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template
    if not same or again(texts)["input_ids"] != tokenizer(texts)["input_ids"]:
        raise Changed("the tokenizer or its chat template is not the base model's")


def _is_tied(model: PreTrainedModel) -> bool:
    head: Any = model.get_output_embeddings()
    body: Any = model.get_input_embeddings()
    return head is not None and head.weight.data_ptr() == body.weight.data_ptr()


def _plain(config: GenerationConfig) -> dict[str, Any]:
    ours = {name: value for name, value in config.to_dict().items() if value is not None}
    return {name: value for name, value in ours.items() if name not in ("transformers_version", "_from_model_config")}
