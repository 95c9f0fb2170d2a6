"""Write a Llama or Qwen2 model as one GGUF file for llama.cpp and Ollama, and compare the file with the model.

write(Path("data/model"), Path("model-q8_0.gguf"), "q8_0")
"""

import ctypes
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
from transformers import AutoModelForCausalLM, GgufConfig

from training.models.adapters import next_token_difference, prompt_logits
from training.models.base_tensors import untouched
from training.models.loading import load_config
from training.models.tokenizer import load_tokenizer

FAMILIES = {"llama": "llama", "qwen2": "qwen2"}  # transformers' model_type: GGUF's architecture
# Largest mean KL of next-token distributions between the model and its GGUF: what rounding explains.
MAX_KL = {"f16": 1e-4, "q8_0": 1e-2, "q6_k": 3e-2, "q5_k_m": 0.1, "q4_k_m": 0.3}
Q = gguf.GGMLQuantizationType
# llama.cpp's mixtures: the type of most weights, and of those that suffer most from rounding.
MIXTURES = {
    "f16": (Q.F16, Q.F16),
    "q8_0": (Q.Q8_0, Q.Q8_0),
    "q6_k": (Q.Q6_K, Q.Q6_K),
    "q5_k_m": (Q.Q5_K, Q.Q6_K),
    "q4_k_m": (Q.Q4_K, Q.Q6_K),
}
# What llama.cpp takes instead for rows that are not a multiple of the type's block.
FALLBACK = {Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0}


class Unsupported(ValueError):
    """A model that this module cannot write correctly."""


def write(folder: Path, target: Path, kind: str) -> None:
    """Write the model as one of `MIXTURES`; norms and biases stay float32, as llama.cpp expects."""
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    family = _family(config)
    writer = gguf.GGUFWriter(str(target), family)
    _add_shape(writer, config, kind)
    _add_tokenizer(writer, tokenizer, config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_hidden_layers)
    for name, tensor in _tensors(folder, config):
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise Unsupported(f"GGUF has no name for the tensor {name}")
        values = _permuted(name, tensor, config, family).float().numpy()
        _add_tensor(writer, gguf_name, values, _tensor_type(gguf_name, values.shape, config, kind))
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
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])


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
    for name in ("bos", "eos", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
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
    skipped = {*untouched(folder), *(["lm_head.weight"] if config.tie_word_embeddings else [])}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name not in skipped:
                    yield name, file.get_tensor(name)


def _permuted(name: str, tensor: Tensor, config: Any, family: str) -> Tensor:
    """Reorder query and key weights of Llama: llama.cpp rotates neighbours, transformers rotates halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if family != "llama" or heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _tensor_type(name: str, shape: tuple[int, ...], config: Any, kind: str) -> gguf.GGMLQuantizationType:
    if len(shape) == 1:
        return Q.F32
    most, sensitive = MIXTURES[kind]
    wanted = sensitive if _is_sensitive(name, config) else most
    for quantization in (wanted, FALLBACK.get(wanted, Q.F16)):
        if shape[-1] % gguf.GGML_QUANT_SIZES[quantization][0] == 0:
            return quantization
    return Q.F16


def _is_sensitive(name: str, config: Any) -> bool:
    """The head, and the value and down projections of the first and last eighth of the layers and every third between.

    llama.cpp chooses the same tensors for its `_m` mixtures.
    """
    if name == ("token_embd.weight" if config.tie_word_embeddings else "output.weight"):
        return True
    block, _, part = name.removeprefix("blk.").partition(".")
    if part not in ("attn_v.weight", "ffn_down.weight"):
        return False
    number, layers = int(block), config.num_hidden_layers
    eighth = layers // 8
    return number < eighth or number >= 7 * layers // 8 or (number - eighth) % 3 == 2


def _add_tensor(writer: Any, name: str, values: numpy.ndarray, quantization: gguf.GGMLQuantizationType) -> None:
    if quantization in (Q.F32, Q.F16):
        writer.add_tensor(name, values.astype(numpy.float32 if quantization == Q.F32 else numpy.float16))
    else:
        writer.add_tensor(name, quantize(values, quantization), raw_dtype=quantization)


def quantize(values: numpy.ndarray, quantization: gguf.GGMLQuantizationType) -> numpy.ndarray:
    """Rows of float32 in blocks of a quantized type, by ggml's own code: gguf's has no K types."""
    import xllamacpp.xllamacpp as library  # its wheel contains ggml

    rows, columns = values.shape
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    source = numpy.ascontiguousarray(values, dtype=numpy.float32)
    target = numpy.empty((rows, columns // block * size), dtype=numpy.uint8)
    quantize_chunk = ctypes.CDLL(library.__file__).ggml_quantize_chunk
    # Type, source, target, first value, rows, columns, importance matrix.
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    quantize_chunk.restype = ctypes.c_size_t
    written = quantize_chunk(quantization, source.ctypes.data, target.ctypes.data, 0, rows, columns, None)
    if written != target.nbytes:
        raise RuntimeError(f"ggml wrote {written} bytes of {quantization.name}, not {target.nbytes}")
    return target
