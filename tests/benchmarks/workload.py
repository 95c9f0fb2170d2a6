"""Workloads of the benchmarks: models with random weights, and pairs of random tokens with realistic lengths."""

import multiprocessing
import os
import pickle
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, Qwen2Config, Qwen3NextConfig

from training.models.dtypes import DTYPES
from training.pairs.pair import Pair

# Qwen2.5's own values; `tiny` is for trying the scripts out on a CPU.
SHAPES = {
    "tiny": (64, 2, 4, 2, 128, True, 1000),
    "0.5b": (896, 24, 14, 2, 4864, True, 151936),
    "1.5b": (1536, 28, 12, 2, 8960, True, 151936),
    "7b": (3584, 28, 28, 4, 18944, False, 152064),
}

# Qwen3-Next's parts: three gated delta nets to a layer of attention, and experts. Hidden size, layers, attention heads
# and their size, experts, active experts, their size, value heads of a delta net and their size, vocabulary.
HYBRID_SHAPES = {
    "qwen3-next-tiny": (256, 4, 4, 64, 16, 4, 128, 8, 32, 8000),
    "qwen3-next-3b": (2048, 16, 16, 256, 32, 10, 512, 32, 128, 151936),
}

# Log-normal: mean and sigma of ln(tokens) of prompt, chosen and rejected.
LENGTHS = {
    "ultrafeedback": ((4.9, 0.9), (5.5, 0.7), (5.35, 0.8)),
    "hh": ((5.0, 0.75), (4.0, 0.8), (4.0, 0.8)),
    "short": ((2.5, 0.5), (2.5, 0.5), (2.5, 0.5)),
    "long": ((10.3, 0.2), (6.5, 0.5), (6.5, 0.5)),
    "128k": ((11.75, 0.0), (6.9, 0.1), (6.9, 0.1)),
}
LONGEST_PART = {"long": 34_000, "128k": 127_000}  # 1024 otherwise
LONGEST_PAIR = {"long": 36_000, "128k": 131_072}  # 2048 otherwise


def qwen_config(shape: str) -> Qwen2Config:
    hidden, layers, heads, kv_heads, intermediate, tied, vocabulary = SHAPES[shape]
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
    )


def hybrid_config(shape: str) -> Qwen3NextConfig:
    hidden, layers, heads, head_size, experts, active, expert_size, values, size, vocabulary = HYBRID_SHAPES[shape]
    return Qwen3NextConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=head_size,
        num_experts=experts,
        num_experts_per_tok=active,
        moe_intermediate_size=expert_size,
        shared_expert_intermediate_size=expert_size,
        linear_num_key_heads=values // 2,
        linear_num_value_heads=values,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        vocab_size=vocabulary,
    )


def config_of(shape: str) -> PreTrainedConfig:
    return hybrid_config(shape) if shape in HYBRID_SHAPES else qwen_config(shape)


def make_model_in_subprocess(shape: str, dtype: str, scratch: Path) -> Path:
    """A folder with random weights of the shape; a subprocess makes it once, so that no GPU memory stays in use."""
    folder = scratch / f"{shape}-{dtype}"
    if not folder.exists():
        maker = multiprocessing.get_context("spawn").Process(target=make_model, args=(shape, dtype, folder))
        maker.start()
        maker.join()
        assert folder.exists(), f"the process that makes {folder} exited with {maker.exitcode}"
    return folder


def make_model(shape: str, dtype: str, folder: Path) -> None:
    """Write the model by an atomic rename."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=DTYPES[dtype])
    model.generation_config = GenerationConfig()
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    model.save_pretrained(temporary)
    os.rename(temporary, folder)


def make_pairs(lengths: str, count: int, vocabulary: int, seed: int = 0) -> list[Pair]:
    """Pairs that are the same on every machine; a pair that is too long is shortened in proportion."""
    rng = random.Random(seed)
    longest_part, longest_pair = LONGEST_PART.get(lengths, 1024), LONGEST_PAIR.get(lengths, 2048)
    pairs = []
    for number in range(count):
        sizes = [min(longest_part, max(1, round(rng.lognormvariate(*part)))) for part in LENGTHS[lengths]]
        if sum(sizes) > longest_pair:
            sizes = [size * longest_pair // sum(sizes) for size in sizes]
        # Token 0 is TRL's padding.
        prompt, chosen, rejected = (rng.choices(range(1, vocabulary), k=size) for size in sizes)
        pairs.append(Pair(str(number), prompt, chosen, rejected, [1] * len(chosen), [1] * len(rejected)))
    return pairs


def write_pairs(pairs: Sequence[Pair], path: Path) -> Path:
    path.write_bytes(pickle.dumps(list(pairs)))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file as the pipeline reads them, without malformed ones."""
    from tasks.source.readers import read_chunks, rows_in
    from tasks.source.reject_reasons import RejectedRow

    rows = (row for chunk in read_chunks(path, path.name) for _, row in rows_in(chunk))
    return [row for row in rows if not isinstance(row, RejectedRow)]


def tokenised(rows: Iterable[dict[str, Any]], model: Path, count: int, longest: int) -> list[Pair]:
    """The first rows with at most `longest` tokens in a sequence, tokenised as in the stage `prepare`."""
    from tasks.prepare.rows.preference import RowLayout
    from tasks.prepare.rows.row_shapes import detect_shape, to_preferences
    from tasks.prepare.templates import choose_template
    from tasks.prepare.tokenization import TokenizedPair, tokenize
    from tasks.source.reject_reasons import RejectedRow
    from training.models.tokenizer import load_tokenizer

    rows = list(rows)
    template = choose_template(load_tokenizer(model), "auto", {}, "last")
    layout = RowLayout(detect_shape(rows[0]) or "pairs", expand="all")
    pairs = (pair for row in rows for pair in to_preferences(row, layout))
    preferences = [pair for pair in pairs if not isinstance(pair, RejectedRow)]
    good = [tokens for tokens in tokenize(template, preferences) if isinstance(tokens, TokenizedPair)]
    short = [t for t in good if t.length <= longest][:count]
    if len(short) < count:
        sys.exit(f"error: {len(short)} of {len(rows)} rows have at most {longest} tokens, and {count} are needed.")
    return [
        Pair(
            str(number), t.prompt_ids, t.chosen_ids, t.rejected_ids, [1] * len(t.chosen_ids), [1] * len(t.rejected_ids)
        )
        for number, t in enumerate(short)
    ]
