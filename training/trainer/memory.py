"""Estimate the memory that a training run needs on each device, before anything is loaded.

Weights, gradients, optimizer states and the largest row are counted exactly. The activations of a row are counted by
layer, with measured factors (docs/decisions).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from training.distributed.tensor_parallel import split_features
from training.models.adaptation import Adaptation, examine
from training.models.dtypes import DTYPES
from training.models.loading import empty_model, load_config
from training.models.recurrent_layers import recurrent_layers
from training.pairs.batches import pair_costs, step_pairs, total_steps
from training.pairs.pair import Pair, pack
from training.pairs.pair_columns import columns_of
from training.scoring.attention import LONG
from training.scoring.head import CHUNK_BYTES, KEEP_BYTES
from training.trainer.engine import BUCKET
from training.trainer.settings import MOMENT_BYTES, Settings

GIB = 2**30
OutOfMemory = torch.OutOfMemoryError
# Activations that a layer keeps per token, as multiples of its hidden, attention and intermediate sizes.
HIDDEN, ATTENTION, INTERMEDIATE = 5.0, 2.0, 3.0
# Of the hidden states that a router copies to experts, and of a recurrent layer's projections.
ROUTED, RECURRENT = 2.5, 6.5
# More values per token during the backward pass through one layer: gradients and recomputed activations.
BACKWARD_HIDDEN, BACKWARD_INTERMEDIATE = 3.0, 3.5
OVERHEAD = 1.0 * GIB  # CUDA context and allocator
QUANTIZED_BYTES = {None: 0.0, "nf4": 0.55, "fp8": 2.0}  # fp8 keeps a second copy for the backward pass
LOOK_AHEAD = 32  # steps whose rows are packed to find the largest


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, by purpose."""

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
    quantized: int  # number of the parameters that are quantized
    quantized_bytes: float  # of each of them
    layers: int
    hidden: int
    attention: int  # query, key and value of one token
    queries: int  # of them, the query; the result is as large
    intermediate: int
    vocabulary: int
    routed: int = 0  # hidden states of one token, once for each active expert
    recurrent: float = 0.0  # projections of one token in recurrent layers, as a mean of all layers
    split: int = 0  # number of the parameters, and of the trainable ones, that tensor parallelism splits
    trainable_split: int = 0
    adapted: Adaptation | None = None  # None: full fine-tuning, or no training

    def weight_bytes(self, value_bytes: int) -> float:
        return (self.parameters - self.quantized) * value_bytes + self.quantized * self.quantized_bytes

    def of_rank(self, ranks: int) -> "Sizes":
        """What each of the ranks has that share every layer."""
        return replace(
            self,
            parameters=self.parameters - self.split + self.split // ranks,
            trainable=self.trainable - self.trainable_split + self.trainable_split // ranks,
            attention=self.attention // ranks,
            queries=self.queries // ranks,
            intermediate=self.intermediate // ranks,
        )


def estimate(settings: Settings, world: int, pairs: Sequence[Pair] = ()) -> Estimate:
    """Peak on each of `world` devices, for the rows of these pairs, or for full rows without pairs."""
    sizes = sizes_of(settings).of_rank(settings.tensor_parallel)
    full = (settings.row_tokens, int(0.75 * settings.row_tokens))
    ranks = settings.sequence_parallel  # each of them has its share of a row
    world //= settings.tensor_parallel  # ZeRO shards a part over the ranks that have it
    row = _largest_row(pairs, settings, sizes.hidden, world // ranks) if pairs else full
    tokens, targets = (math.ceil(count / ranks) for count in row)
    value_bytes = DTYPES[settings.dtype].itemsize
    shard = 1 / world
    whole = 0.0 if settings.offload == "all" else shard if settings.zero_stage == 3 else 1.0
    states = sizes.trainable * shard if settings.offload == "none" else 0.0
    kept, live = _tiled(sizes, tokens, settings.mlp_tile_tokens)
    keeps_attention = settings.activation_checkpointing is True and _has_long_sequences(pairs, settings)
    rows = tokens * (_forward_values(kept, settings) + keeps_attention * sizes.layers * sizes.queries) * value_bytes
    logits = _logit_bytes(sizes, targets, value_bytes)
    experts, layer_experts = _expert_values(sizes, settings)
    working = tokens * _backward_values(live, settings) + layer_experts
    # The logits are freed before the backward pass reaches the layers: only the larger of the two counts.
    backward = max(0.0, working * value_bytes - logits)
    freed = rows + logits + backward + experts * value_bytes
    update = 4.0 if value_bytes == 4 else value_bytes + 4.0  # flat and float32 copies of the gradients
    return Estimate(
        {
            "weights": sizes.weight_bytes(value_bytes) * whole,
            "adapter": _own_parameters(sizes) * value_bytes * whole,
            "gradients": sizes.trainable * value_bytes * (shard if settings.zero_stage > 1 else 1),
            "reference copy": sizes.trainable * value_bytes * whole if settings.reference_update else 0.0,
            "buckets": 0.0 if settings.zero_stage == 3 else 2.0 * min(BUCKET, sizes.trainable) * value_bytes,
            "optimizer": states * (4.0 + MOMENT_BYTES[settings.optimizer]),  # master weights and two moments
            "rows": rows,
            "logits": logits,
            "backward": backward,
            "adapted experts": float(experts * value_bytes),
            "update": max(0.0, states * update - freed),
            "overhead": OVERHEAD,
        }
    )


def _largest_row(pairs: Sequence[Pair], settings: Settings, hidden: int, world: int) -> tuple[int, int]:
    """Tokens and predicted tokens of the largest row of the first steps, or of the longest pair if that is larger."""
    columns, costs = columns_of(pairs), pair_costs(pairs, hidden)
    sizes = np.stack([columns.lengths, columns.targets])  # (2, pairs)
    longest = sizes[0].max()
    largest = (int(longest), int(sizes[1][sizes[0] == longest].max()))
    steps = total_steps(len(pairs), settings.global_batch_size, settings.epochs, settings.max_steps)
    for step in range(min(LOOK_AHEAD, steps)):
        numbers = step_pairs(step, len(pairs), settings.global_batch_size, settings.seed)
        rows = pack(costs[numbers].tolist(), sizes[0][numbers].tolist(), settings.row_tokens, multiple=world)
        for row in rows:
            tokens, targets = sizes[:, [numbers[item] for item in row]].sum(axis=1).tolist()
            largest = max(largest, (tokens, targets))
    return largest


def _has_long_sequences(pairs: Sequence[Pair], settings: Settings) -> bool:
    """Whether activation checkpointing keeps the results of attention, on a GPU that has the kernels."""
    usable = settings.dtype != "float32" and not settings.deterministic and settings.zero_stage < 3
    return usable and bool(pairs) and int(columns_of(pairs).lengths.max()) >= LONG


def _tiled(sizes: Sizes, tokens: int, tile: int | None) -> tuple[Sizes, Sizes]:
    """The sizes of what the forward pass keeps, and of what exists in one layer: a tiled MLP keeps nothing."""
    if tile is None or tile >= tokens:
        return sizes, sizes
    return replace(sizes, intermediate=0), replace(sizes, intermediate=math.ceil(sizes.intermediate * tile / tokens))


def _forward_values(sizes: Sizes, settings: Settings) -> float:
    """Values per token that the forward pass keeps; with activation checkpointing, only the layers' inputs."""
    if settings.activation_checkpointing == "offload":
        return 2 * sizes.hidden  # a layer's, and the one that is being copied
    if settings.activation_checkpointing:
        return sizes.layers * sizes.hidden
    return sizes.layers * _layer_values(sizes)


def _backward_values(sizes: Sizes, settings: Settings) -> float:
    """Values per token that the backward pass through a layer adds; with checkpointing, also its recomputed ones."""
    working = BACKWARD_HIDDEN * (sizes.hidden + sizes.routed) + BACKWARD_INTERMEDIATE * sizes.intermediate
    return working + (_layer_values(sizes) if settings.activation_checkpointing else 0.0)


def _layer_values(sizes: Sizes) -> float:
    dense = HIDDEN * sizes.hidden + ATTENTION * sizes.attention + INTERMEDIATE * sizes.intermediate
    return dense + ROUTED * sizes.routed + RECURRENT * sizes.recurrent


def _own_parameters(sizes: Sizes) -> int:
    """Of the adapter; the copies of modules count as the model's."""
    return sizes.adapted.trainable - sizes.adapted.copied if sizes.adapted else 0


def _expert_values(sizes: Sizes, settings: Settings) -> tuple[int, int]:
    """Values of adapted experts that the forward pass keeps, and that the backward pass through a layer adds.

    peft computes W + B A of all experts of a layer in each pass, whatever the number of tokens. Autograd keeps the sum,
    and its gradient is of the same size. Activation checkpointing keeps no sum and computes a layer's again.
    """
    by_layer = sizes.adapted.experts.values() if sizes.adapted else ()
    largest = max(by_layer, default=0)
    return (0, 2 * largest) if settings.activation_checkpointing else (sum(by_layer), largest)


def _logit_bytes(sizes: Sizes, targets: int, value_bytes: int) -> float:
    whole = targets * sizes.vocabulary * value_bytes
    return whole if whole <= KEEP_BYTES else 2.0 * CHUNK_BYTES


def model_sizes(folder: Path, adapter: dict[str, Any] | None, quantization: str | None = None) -> Sizes:
    """Sizes of the model in a folder, from its configuration, without loading weights.

    ValueError in a sentence if the adapter does not fit the model.
    """
    config = load_config(folder)
    model = empty_model(config)
    text, head = config.get_text_config(), model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    split, adapted = split_features(model), examine(model, adapter) if adapter else None
    parameters = sum(p.numel() for p in model.parameters())
    split_parameters = trainable_split = sum(m.weight.numel() for m in split)
    if adapted:
        names = ((f"{name}.weight", module) for name, module in model.named_modules())
        trainable_split = sum(adapted.ranks.get(name, 0) * split[module] for name, module in names if module in split)
    heads = getattr(text, "num_attention_heads", None) or 0  # recurrent models may have none
    size = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    active = getattr(text, "num_experts_per_tok", None) if (experts := _expert_size(model)) else None
    return Sizes(
        parameters=parameters + (adapted.copied if adapted else 0),
        trainable=adapted.trainable if adapted else parameters,
        quantized=sum(m.weight.numel() for m in linears) if quantization else 0,
        quantized_bytes=QUANTIZED_BYTES[quantization],
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        attention=size * (heads + 2 * key_heads),
        queries=size * heads,
        intermediate=active * experts if active else getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        routed=(active or 0) * text.hidden_size,
        recurrent=_recurrent_features(model, text.hidden_size) / text.num_hidden_layers,
        split=split_parameters,
        trainable_split=trainable_split,
        adapted=adapted,
    )


def sizes_of(settings: Settings) -> Sizes:
    return model_sizes(Path(settings.model), settings.adapter, settings.quantization)


def _expert_size(model: nn.Module) -> int:
    """The intermediate size of an expert; 0 without experts. transformers keeps all experts' weights in one tensor."""
    weights = (getattr(module, "down_proj", None) for module in model.modules())
    return next((w.shape[-1] for w in weights if isinstance(w, nn.Parameter) and w.dim() == 3), 0)


def _recurrent_features(model: nn.Module, hidden: int) -> int:
    """What recurrent layers project the hidden states to, of one token and all layers."""
    projections = (m for layer in recurrent_layers(model) for m in layer.children() if isinstance(m, nn.Linear))
    return sum(m.out_features for m in projections if m.in_features == hidden)


def weight_bytes(folder: Path, dtype: str, quantization: str | None) -> float:
    """Bytes of the model in a folder when it is loaded to sample or to score."""
    return model_sizes(folder, None, quantization).weight_bytes(DTYPES[dtype].itemsize)


def check_fits(settings: Settings, pairs: Sequence[Pair], world: int, device: torch.device) -> None:
    """ValueError if the run does not fit on this GPU."""
    if device.type != "cuda":
        return
    needed, available = estimate(settings, world, pairs), torch.cuda.get_device_properties(device).total_memory
    if needed.total > available:
        raise ValueError(
            f"this run needs about {needed} on each GPU, which has {available / GIB:.0f} GiB: {advice(settings)}"
        )


def out_of_memory(settings: Settings, world: int) -> str:
    return (
        f"a worker ran out of memory with rows of {settings.row_tokens} tokens; the run needs about "
        f"{estimate(settings, world)} on each device: {advice(settings)}"
    )


def advice(settings: Settings) -> str:
    """The cheapest change that saves memory."""
    group = "actor_train in infra/cluster.yaml"
    if settings.row_tokens > 4096:
        return f"lower {group} row_tokens (now {settings.row_tokens})"
    if not settings.activation_checkpointing:
        return f"set {group} activation_checkpointing: true"
    if settings.activation_checkpointing is True and settings.adapter:  # rows are most of its memory
        return f"set {group} activation_checkpointing: offload"
    if settings.zero_stage < 3:
        return f"raise {group} zero_stage to 3, or num_workers"
    return f"set {group} offload: all, sequence_parallel: N or tensor_parallel: N, or use train.adapter"
