"""Check within seconds that a model folder can be trained: configuration, weights, tokenizer, chat template.

Reads headers, no weights. What is wrong is a ValueError with one sentence that says what to do. A folder from others
may make a library loop or abort: call this in a child (tasks/system/limited_child.py).
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from training.models.chat import render
from training.models.loading import TOKENS, empty_model, load_config, missing_tensors
from training.models.model_files import VOCABULARIES, embedded_adapter, loadable, model_files, read_object
from training.models.tokenizer import load_tokenizer
from training.models.transformers_internals import known_caches, known_quantizations
from training.models.weights import read_headers

T = TypeVar("T")
EMBEDDINGS = re.compile(r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight$")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LARGEST_BUFFERS = 4 << 30  # bytes that a model computes when it is loaded, such as masks
PROBE = "".join(map(chr, range(32, 127))) + " Ünïcödé ½ ﬁ 日本語 한국어 العربية हिन्दी 😀\n\t"
MOST_TOKENS = 32  # per character: bytes of a character that Unicode writes as several
FLAGS = ("do_sample", "use_cache")
NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "num_beams",
    "num_return_sequences",
)


def check_folder(folder: str, template: str = "auto", adapter: bool = False) -> list[str]:
    """What a user should know about a model that can be trained; ValueError if it cannot be.

    `adapter`: the files of an adapter may lie in the folder, because they are named as one.
    """
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # the threads of a parent that has computed are not there in its forked child
    path = Path(folder)
    if not adapter and (found := embedded_adapter(path)):
        raise ValueError(
            f"its folder also holds an adapter ({found}), which would be left out. Set source.adapter: {folder} to "
            "train the model with the adapter merged, or move the adapter's files away"
        )
    model_files(path)
    config = _tried("its config.json cannot be used", load_config, path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"`{config.model_type}` is no causal language model. Choose one that generates text")
    if getattr(config.get_text_config(), "num_hidden_layers", 1) < 1:
        raise ValueError("its config.json says that it has no layers. Fetch the model again")
    headers = read_headers(path)
    notes = _check_tensors(config, headers)
    rows = next((tensor.shape[0] for name, tensor in headers.items() if EMBEDDINGS.search(name)), None)
    tokenizer = _checked_tokenizer(path)
    _check_ids(tokenizer, rows or config.get_text_config().vocab_size)
    _check_generation(path)
    if template == "auto" and tokenizer.chat_template:
        _check_template(tokenizer)
    return notes


def _tried(problem: str, work: Callable[..., T], *args: Any) -> T:
    """Whatever a library says about a damaged file, as one sentence."""
    try:
        return work(*args)
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(f"{problem}: {_first_line(error)}") from None


def _check_tensors(config: PreTrainedConfig, headers: dict[str, Tensor]) -> list[str]:
    """Compare names, shapes and types with those of the model, by transformers' own report of loading the headers."""
    if quantized := getattr(config, "quantization_config", None):
        _check_quantization(quantized)
        return []  # other names and types than the model's; `load_model` refuses what is missing
    if odd := sorted(name for name, tensor in headers.items() if _is_odd(name, tensor)):
        raise ValueError(f"its tensor {odd[0]} holds {headers[odd[0]].dtype}, no floats. Save the weights as bfloat16")
    empty = _tried("its config.json describes no model", empty_model, config)
    if (size := sum(buffer.nbytes for buffer in empty.buffers())) > LARGEST_BUFFERS:
        raise ValueError(f"its config.json asks for masks and other buffers of {size >> 30} GiB. Correct the lengths")
    report, name = _loading_report(empty, headers), type(empty).__name__
    if wrong := sorted(report["mismatched_keys"]):
        tensor, stored, expected = wrong[0]
        raise ValueError(
            f"{len(wrong)} of its tensors have another shape than config.json says, such as {tensor} with "
            f"{list(stored)} instead of {list(expected)}. Fetch the model again"
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(missing_tensors(missing, name))
    unused = sorted(report["unexpected_keys"])
    return [f"{len(unused)} tensors of its files are no part of {name}, such as {unused[0]}"] if unused else []


def _loading_report(empty: PreTrainedModel, headers: dict[str, Tensor]) -> dict[str, Any]:
    """transformers knows what is tied, fused and renamed; on the meta device loading costs nothing."""
    options = {"config": empty.config, "state_dict": headers, "device_map": "meta", "ignore_mismatched_sizes": True}
    kind: Any = type(empty)
    try:
        return dict(kind.from_pretrained(None, trust_remote_code=False, output_loading_info=True, **options)[1])
    except Exception as error:
        fused = "tensors that belong together, such as a layer's experts, are incomplete or differ in shape"
        detail = fused if "conversion of the weights" in str(error) else _first_line(error)
        raise ValueError(f"its tensors do not fit its config.json: {detail}. Fetch the model again") from None


def _is_odd(name: str, tensor: Tensor) -> bool:
    return name.endswith(("weight", "bias")) and tensor.dtype not in FLOATS


def _check_quantization(quantized: Any) -> None:
    method = quantized.get("quant_method") if isinstance(quantized, dict) else getattr(quantized, "quant_method", None)
    if str(getattr(method, "value", method)) not in known_quantizations():
        raise ValueError(f"its config.json names the unknown quantization {method!r}. Choose the model in bfloat16")


def _check_generation(folder: Path) -> None:
    name = "generation_config.json"
    content = read_object(folder / name) if (folder / name).is_file() else {}
    for key, value in content.items():
        if value is not None and not _fits(key, value):
            raise ValueError(f"{name}: `{key}` cannot be {value!r:.60}. Correct it, or delete the file")
    if content:
        with loadable(folder) as files:
            _tried(f"its {name} cannot be used", GenerationConfig.from_pretrained, files)


def _fits(key: str, value: Any) -> bool:
    if key in TOKENS:  # -1 stands for none
        return all(type(n) is int and -1 <= n < 2**31 for n in (value if isinstance(value, list) else [value]))
    if key == "cache_implementation":
        return value in known_caches()
    expected = (int, float) if key in NUMBERS else (bool,) if key in FLAGS else None
    return expected is None or type(value) in expected


def _checked_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise ValueError(
            f"it has no tokenizer (none of {', '.join(VOCABULARIES)}). Copy the tokenizer's files into the folder, or "
            "write them with `tokenizer.save_pretrained`"
        )
    try:
        tokenizer = load_tokenizer(folder)
        tokens = len(tokenizer(PROBE)["input_ids"])
    except Exception as error:
        raise ValueError(f"its tokenizer does not load: {_first_line(error)}. Save or fetch it again") from None
    if tokens > MOST_TOKENS * len(PROBE):
        raise ValueError(
            f"its tokenizer makes {tokens} tokens of {len(PROBE)} characters: a normalizer in tokenizer.json expands "
            "text. Use the model's own tokenizer"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "its tokenizer has no EOS token, so no answer could end. Set `eos_token` in tokenizer_config.json"
        )
    return tokenizer


def _check_ids(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Some models have special tokens beyond their embeddings that no text contains, such as those of images."""
    needed = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    text = str(tokenizer.chat_template or "")
    unused = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special and token.content not in text}
    beyond = {n: token for token, n in tokenizer.get_vocab().items() if n >= rows and n not in unused - needed}
    if beyond:
        raise ValueError(
            f"its tokenizer has {len(beyond)} tokens beyond the {rows} rows of its embeddings, such as "
            f"{beyond[min(beyond)]!r} ({min(beyond)}). Use the model's own tokenizer, or resize the embeddings with "
            "`model.resize_token_embeddings` and save the model again"
        )


def _check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}]
    try:
        render(tokenizer, chat[:1], add_generation_prompt=True)
        whole = render(tokenizer, chat)
        problem = "" if all(turn["content"] in whole for turn in chat) else "the text of a turn is missing"
    except Exception as error:
        problem = _first_line(error)
    if problem:
        raise ValueError(
            f"its chat template cannot render a question and an answer: {problem}. Set prepare.template to plain, "
            "chatml or the text of a template"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
