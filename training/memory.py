"""How much memory a training run needs on each device, before anything is loaded.

Weights, gradients, optimizer states and the rows to come are counted; what a row keeps for its backward pass is counted
by layer with factors that were measured (docs/performance.md).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from training.batches import pair_costs, step_pairs, total_steps
from training.dtypes import DTYPES
from training.engine import BUCKET
from training.head import CHUNK_BYTES, KEEP_BYTES
from training.packing import Pair, pack
from training.settings import Settings

GIB = 2**30
OutOfMemory = torch.OutOfMemoryError
# Values that a layer keeps of each token: multiples of its hidden, attention and intermediate sizes.
HIDDEN, ATTENTION, INTERMEDIATE = 5.0, 2.0, 3.0
# Values of each token that the backward pass through one layer holds besides: gradients, and what it computes again.
BACKWARD_HIDDEN, BACKWARD_INTERMEDIATE = 3.0, 3.5
OVERHEAD = 1.0 * GIB  # the CUDA context's and the allocator's own
LOOK_AHEAD = 32  # steps whose rows are looked at


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, by what they hold."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size > 0.05 * GIB)
        return f"{self.total / GIB:.1f} GiB ({parts})"


@dataclass(frozen=True)
class Sizes:
    parameters: int
    trainable: int
    quantized: int  # of the parameters, those in 4 bits
    layers: int
    hidden: int
    attention: int  # query, key and value of a token
    intermediate: int
    vocabulary: int


def estimate(settings: Settings, world: int, pairs: Sequence[Pair] = ()) -> Estimate:
    """Peak on each of `world` devices, for rows of these pairs or for rows that are full."""
    sizes = measure(Path(settings.model), settings.adapter, settings.quantization)
    full = (settings.row_tokens, int(0.75 * settings.row_tokens))
    tokens, targets = _largest_row(pairs, settings, sizes.hidden, world) if pairs else full
    wide = DTYPES[settings.dtype].itemsize
    shard = 1 / world
    whole = 0.0 if settings.offload == "all" else shard if settings.zero_stage == 3 else 1.0
    weights = _weights(sizes, wide)
    states = sizes.trainable * shard if settings.offload == "none" else 0.0
    rows = tokens * _kept(sizes, settings.activation_checkpointing) * wide
    logits = _logits(sizes, targets, wide)
    # The logits have gone when the backward pass comes to the layers: the larger of the two counts.
    backward = max(0.0, tokens * _backward(sizes, settings.activation_checkpointing) * wide - logits)
    return Estimate(
        {
            "weights": weights * whole,
            "gradients": sizes.trainable * wide * (shard if settings.zero_stage > 1 else 1),
            "reference copy": sizes.trainable * wide * whole if settings.reference_update else 0.0,
            "buckets": 0.0 if settings.zero_stage == 3 else 2.0 * min(BUCKET, sizes.trainable) * wide,
            "optimizer": states * 12.0,  # master weights and two moments
            "rows": rows,
            "logits": logits,
            "backward": backward,
            # Float32 gradients come when all of these have gone.
            "update": max(0.0, states * 4.0 - rows - logits - backward),
            "overhead": OVERHEAD,
        }
    )


def _largest_row(pairs: Sequence[Pair], settings: Settings, hidden: int, world: int) -> tuple[int, int]:
    """Tokens and predicted tokens of the largest row of the first steps; a row of the longest pair may come later."""
    lengths, costs = list(map(len, pairs)), pair_costs(pairs, hidden)
    sizes = [(length, pair.targets) for length, pair in zip(lengths, pairs, strict=True)]
    largest = max(sizes)
    steps = total_steps(len(pairs), settings.global_batch_size, settings.epochs, settings.max_steps)
    for step in range(min(LOOK_AHEAD, steps)):
        numbers = step_pairs(step, len(pairs), settings.global_batch_size, settings.seed)
        rows = pack([costs[n] for n in numbers], [lengths[n] for n in numbers], settings.row_tokens, multiple=world)
        for row in rows:
            tokens, targets = (sum(sizes[numbers[item]][part] for item in row) for part in (0, 1))
            largest = max(largest, (tokens, targets))
    return largest


def _kept(sizes: Sizes, activation_checkpointing: bool) -> float:
    """Values of each token from the forward pass on; with activation checkpointing a layer's input alone."""
    return sizes.layers * (sizes.hidden if activation_checkpointing else _layer(sizes))


def _backward(sizes: Sizes, activation_checkpointing: bool) -> float:
    """Values of each token that the backward pass through one layer adds; with checkpointing the layer's own too."""
    working = BACKWARD_HIDDEN * sizes.hidden + BACKWARD_INTERMEDIATE * sizes.intermediate
    return working + (_layer(sizes) if activation_checkpointing else 0.0)


def _layer(sizes: Sizes) -> float:
    return HIDDEN * sizes.hidden + ATTENTION * sizes.attention + INTERMEDIATE * sizes.intermediate


def _logits(sizes: Sizes, targets: int, wide: int) -> float:
    whole = targets * sizes.vocabulary * wide
    return whole if whole <= KEEP_BYTES else 2.0 * CHUNK_BYTES


def measure(folder: Path, adapter: dict[str, Any] | None, quantization: str | None = None) -> Sizes:
    """Sizes of the model in a folder, from its configuration alone."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    text, head = config.get_text_config(), model.get_output_embeddings()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    parameters = sum(p.numel() for p in model.parameters())
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return Sizes(
        parameters=parameters,
        trainable=_adapter_size(linears, adapter) if adapter else parameters,
        quantized=sum(m.weight.numel() for m in linears.values()) if quantization else 0,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        attention=size * (text.num_attention_heads + 2 * key_heads),
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
    )


def weights(folder: Path, dtype: str, quantization: str | None) -> float:
    """Bytes of the model in a folder as it is loaded to sample and to score."""
    return _weights(measure(folder, None, quantization), DTYPES[dtype].itemsize)


def _weights(sizes: Sizes, wide: int) -> float:
    return (sizes.parameters - sizes.quantized) * wide + sizes.quantized * 0.55


def _adapter_size(linears: dict[str, nn.Linear], adapter: dict[str, Any]) -> int:
    targets = adapter["targets"]
    if targets == "all-linear":
        chosen = list(linears.values())
    elif isinstance(targets, str):
        chosen = [m for name, m in linears.items() if re.fullmatch(targets, name)]
    else:
        chosen = [m for name, m in linears.items() if name.rsplit(".", 1)[-1] in targets]
    return sum(adapter["rank"] * (m.in_features + m.out_features) for m in chosen)


def fits(settings: Settings, pairs: Sequence[Pair], world: int, device: torch.device) -> None:
    """ValueError where the run cannot fit this GPU."""
    if device.type != "cuda":
        return
    needed, room = estimate(settings, world, pairs), torch.cuda.get_device_properties(device).total_memory
    if needed.total > room:
        raise ValueError(
            f"this run needs about {needed} on each GPU, which has {room / GIB:.0f} GiB: {advice(settings)}"
        )


def out_of_memory(settings: Settings, world: int) -> str:
    return (
        f"a worker ran out of memory with rows of {settings.row_tokens} tokens; the run needs about "
        f"{estimate(settings, world)} on each device: {advice(settings)}"
    )


def advice(settings: Settings) -> str:
    """What to change, the cheapest first."""
    group = "actor_train in infra/cluster.yaml"
    if settings.row_tokens > 4096:
        return f"lower {group} row_tokens (now {settings.row_tokens})"
    if not settings.activation_checkpointing:
        return f"set {group} activation_checkpointing: true"
    if settings.zero_stage < 3:
        return f"raise {group} zero_stage to 3, or num_workers"
    return f"set {group} offload: all, or use train.adapter"
