"""Write a Llama or Qwen2 model as one GGUF file for llama.cpp and Ollama, and compare the file with the model.

write(Path("data/model"), Path("model-q8_0.gguf"), "q8_0")
"""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from training.models.adapters import next_token_difference, prompt_logits

FAMILIES = {"llama": "llama", "qwen2": "qwen2"}  # transformers' model_type: GGUF's architecture
# Largest mean KL of next-token distributions between the model and its GGUF: rounding to 11 and to 8 bits.
MAX_KL = {"f16": 1e-4, "q8_0": 1e-2}
BLOCK = 32  # values that share a scale in q8_0


class Unsupported(ValueError):
    """A model that this module cannot write correctly."""


def write(folder: Path, target: Path, kind: str) -> None:
    """Write the model as f16 or q8_0 (`kind`); norms and biases stay float32, as llama.cpp expects."""
    config, tokenizer = (auto.from_pretrained(folder, trust_remote_code=False) for auto in (AutoConfig, AutoTokenizer))
    family = _family(config)
    writer = gguf.GGUFWriter(str(target), family)
    _add_shape(writer, config, kind)
    _add_tokenizer(writer, tokenizer, config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_hidden_layers)
    for name, tensor in _tensors(folder, config):
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise Unsupported(f"GGUF has no name for the tensor {name}")
        _add_tensor(writer, gguf_name, _permuted(name, tensor, config, family), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def difference(target: Path, logits: Sequence[Tensor], prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """The file as transformers reads it: mean KL to the model's logits, and how often the next tokens agree."""
    with redirect_stderr(io.StringIO()):  # a progress bar without an off switch
        model = AutoModelForCausalLM.from_pretrained(
            target.parent,
            gguf_file=target.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
        )
    return next_token_difference(logits, prompt_logits(model.eval(), prompts))


def _family(config: Any) -> str:
    if config.model_type not in FAMILIES:
        raise Unsupported(
            f"a model of type {config.model_type} cannot be written as GGUF; supported: {', '.join(FAMILIES)}"
        )
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type != "default":
        raise Unsupported(f"rotary embeddings of type {rope_type} cannot be written as GGUF")
    if getattr(config, "attention_bias", False) and config.model_type == "llama":
        raise Unsupported("a Llama with biases in its attention cannot be written as GGUF")
    return FAMILIES[config.model_type]


def _add_shape(writer: Any, config: Any, kind: str) -> None:
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type({"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}[kind])


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids) | {t["id"] for t in content["added_tokens"] if t["special"]}
    numbers = range(config.vocab_size)  # the embedding may have more rows than the tokenizer has tokens
    kinds = [gguf.TokenType.UNUSED if n not in tokens else gguf.TokenType.NORMAL for n in numbers]
    for number in special & set(numbers):
        kinds[number] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(content))
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in numbers])
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]])
    writer.add_add_bos_token(False)  # the chat template adds it
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(content: dict[str, Any]) -> str:
    """llama.cpp's name for how text is split before byte-pair encoding."""
    if content["model"]["type"] != "BPE" or content["model"].get("byte_fallback"):
        raise Unsupported("only byte-level BPE tokenizers can be written as GGUF")
    pre_tokenizer = content["pre_tokenizer"] or {}
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [part.get("type") for part in parts]
    pattern = next((part["pattern"].get("Regex", "") for part in parts if part.get("type") == "Split"), "")
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        return "llama-bpe" if r"\p{N}{1,3}" in pattern else "qwen2"
    raise Unsupported(f"a tokenizer that splits text by {', '.join(map(str, kinds))} cannot be written as GGUF")


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if not (name == "lm_head.weight" and config.tie_word_embeddings):
                    yield name, file.get_tensor(name)


def _permuted(name: str, tensor: Tensor, config: Any, family: str) -> Tensor:
    """Reorder query and key weights of Llama: llama.cpp rotates neighbours, transformers rotates halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if family != "llama" or heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _add_tensor(writer: Any, name: str, tensor: Tensor, kind: str) -> None:
    values = tensor.float().numpy()
    if values.ndim == 1:
        writer.add_tensor(name, values)
    elif kind == "q8_0" and values.shape[-1] % BLOCK == 0:
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, values.astype(numpy.float16))
