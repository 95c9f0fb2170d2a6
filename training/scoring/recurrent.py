"""Recurrent layers on packed rows: the state after a prompt is computed once, and both responses continue from it.

Gated delta nets, Mamba-2 layers and short convolutions read tokens in order, so in a row they would carry the state of
one response into the next. Here such a layer computes a row in two steps: a batch of the prompts, then a batch of the
responses, whose initial states and convolution windows are those at the ends of their prompts. Each step is a call of
the layer's own forward with a cache, as in generation, so it uses the kernels of flash-linear-attention, mamba-ssm and
causal-conv1d where transformers does. docs/performance.md has the design and its limits.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.objectives.packing import PackedRow

# Tokens that cost about as much as the kernel launches of one more batch; on a GPU an estimate, not a measurement.
BATCH_COST = {"cpu": 64, "cuda": 512}
SMALLEST_CHUNK = 64  # of Mamba-2, in tokens; kernels are compiled for each size


@dataclass(frozen=True)
class Batch:
    """Sequences of a row, padded to equal lengths."""

    index: Tensor  # (sequences, width) tokens of the row; for padding, one of the sequence
    is_token: Tensor  # (sequences, width)
    prompts: Tensor  # (sequences,) number of the prompt that a sequence continues


@dataclass(frozen=True)
class RowSegments:
    """A row's prompts, its responses, and where the batches have the row's tokens. A shared prefix is in the prompt."""

    prompts: list[Batch]  # padding comes first, so that states and windows are those of the last token
    responses: list[Batch]  # padding comes last, where no token sees it
    positions: Tensor  # (tokens,) in the flattened batches, prompts first


@dataclass
class States:
    """The part of transformers' Cache that a recurrent layer calls, for one layer and one batch; keeps gradients."""

    is_token: Tensor  # (sequences, width)
    conv: dict[int, Tensor] = field(default_factory=dict)  # (sequences, channels, window - 1) by the state's number
    recurrent: dict[int, Tensor] = field(default_factory=dict)  # (sequences, ...)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent.get(state_idx)

    def update_conv_state(self, new: Tensor, layer_idx: int, conv_kernel_size: int, state_idx: int = 0) -> Tensor:
        """The convolution's input, (sequences, channels, window - 1 + width)."""
        new = new * self.is_token[:, None]  # a projection with a bias makes padding non-zero
        before = self.conv.get(state_idx)
        if before is None:
            before = new.new_zeros(*new.shape[:2], conv_kernel_size - 1)
        joined = torch.cat([before, new], -1)
        self.conv[state_idx] = joined[..., new.shape[-1] :]
        return joined

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.recurrent[state_idx] = new
        return new


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that keep the window of their causal convolution in a cache.

    None under ZeRO-3: each batch gathers weights, a collective, and ranks have different numbers of batches.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return []
    return [module for module in model.modules() if _has_convolution(module) and _cache_argument(type(module).forward)]


def follow_segments(layers: list[nn.Module]) -> None:
    """Let the layers compute rows by `row_segments` where the model's forward gets them; other passes do not change."""
    for layer in layers:
        layer.forward = MethodType(_forward, layer)


def _has_convolution(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in module.children())


@cache
def _cache_argument(forward: Callable[..., Any]) -> str | None:
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in names), None)


def _forward(
    layer: nn.Module, hidden_states: Tensor, *args: Any, row_segments: RowSegments | None = None, **options: Any
) -> Tensor:
    """Takes the place of the forward of a recurrent layer's class."""
    if row_segments is None:
        return type(layer).forward(layer, hidden_states, *args, **options)
    ends = [States(batch.is_token) for batch in row_segments.prompts]
    outputs = [_compute(layer, hidden_states, *part) for part in zip(row_segments.prompts, ends, strict=True)]
    conv, recurrent = _joined([end.conv for end in ends]), _joined([end.recurrent for end in ends])
    for batch in row_segments.responses:
        states = States(batch.is_token, _selected(conv, batch.prompts), _selected(recurrent, batch.prompts))
        outputs.append(_compute(layer, hidden_states, batch, states))
    return torch.cat(outputs).index_select(0, row_segments.positions)[None]


def _compute(layer: nn.Module, hidden_states: Tensor, batch: Batch, states: States) -> Tensor:
    """(sequences * width, size); changes the states to those after the batch."""
    inputs = hidden_states[0].index_select(0, batch.index.flatten()).unflatten(0, batch.index.shape)
    forward = type(layer).forward
    options: dict[str, Any] = {"attention_mask": batch.is_token, _cache_argument(forward) or "": states}
    with _short_chunks(layer, inputs.shape[1]):
        return forward(layer, inputs * batch.is_token[..., None], **options).flatten(0, 1)


@contextmanager
def _short_chunks(layer: Any, width: int) -> Iterator[None]:
    """Mamba-2 computes whole chunks, often of 256 tokens, and most responses are shorter; results do not change."""
    own = getattr(layer, "chunk_size", None)
    if own is None:
        yield
        return
    layer.chunk_size = min(own, max(SMALLEST_CHUNK, 1 << (width - 1).bit_length()))
    try:
        yield
    finally:
        layer.chunk_size = own


def _joined(parts: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    return {number: torch.cat([part[number] for part in parts]) for number in parts[0]}


def _selected(states: dict[int, Tensor], sequences: Tensor) -> dict[int, Tensor]:
    return {number: state.index_select(0, sequences) for number, state in states.items()}


def row_segments(row: PackedRow) -> RowSegments:
    device = row.input_ids.device
    lengths = np.array(row.part_lengths)  # (pairs, 3)
    starts = np.cumsum(lengths).reshape(lengths.shape) - lengths
    members = padded_batches(lengths[:, 0], BATCH_COST[device.type])
    number = np.argsort(np.concatenate(members))  # of each pair's prompt in the joined batches
    prompts = [_batch(starts[m, 0], lengths[m, 0], number[m], pads_first=True) for m in members]
    starts, lengths = starts[:, 1:].flatten(), lengths[:, 1:].flatten()
    members = padded_batches(lengths, BATCH_COST[device.type])
    responses = [_batch(starts[m], lengths[m], number[m // 2], pads_first=False) for m in members]
    positions = _positions(prompts + responses, len(row.input_ids))
    return RowSegments(
        [_to(batch, device) for batch in prompts],
        [_to(batch, device) for batch in responses],
        positions.to(device, non_blocking=True),
    )


def padded_batches(lengths: np.ndarray, batch_cost: int) -> list[np.ndarray]:
    """Sequences by batch, longest first, with the fewest padded tokens, where each batch costs some tokens more."""
    order = np.argsort(-lengths, kind="stable")
    longest, count = lengths[order], len(lengths)
    best, begin = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):  # the last batch of the `end` longest sequences
        costs = best[:end] + np.arange(end, 0, -1) * longest[:end] + batch_cost
        begin[end] = costs.argmin()
        best[end] = costs[begin[end]]
    batches, end = [], count
    while end:
        batches.append(order[begin[end] : end])
        end = begin[end]
    return batches[::-1]


def _batch(starts: np.ndarray, lengths: np.ndarray, prompts: np.ndarray, *, pads_first: bool) -> Batch:
    width = max(2, lengths.max())  # layers take one token after a state for a step of generation, without gradients
    offset = np.arange(width) - (width - lengths[:, None] if pads_first else 0)
    is_token = (offset >= 0) & (offset < lengths[:, None])
    index = starts[:, None] + offset.clip(0, lengths[:, None] - 1)
    return Batch(torch.from_numpy(index), torch.from_numpy(is_token), torch.from_numpy(prompts))


def _positions(batches: list[Batch], tokens: int) -> Tensor:
    positions, before = torch.empty(tokens, dtype=torch.long), 0
    for batch in batches:
        positions[batch.index[batch.is_token]] = before + batch.is_token.flatten().nonzero()[:, 0]
        before += batch.is_token.numel()
    return positions


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(value.to(device, non_blocking=True) for value in vars(batch).values()))
