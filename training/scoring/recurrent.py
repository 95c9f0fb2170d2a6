"""Recurrent layers on packed rows: the state after a prompt is computed once, and both responses continue from it.

Gated delta nets, Mamba-2 layers and short convolutions read tokens in order, so in a row they would carry the state of
one response into the next. transformers' layers call a function of their module for the convolution and another one for
the scan over the tokens (`chunk_gated_delta_rule`, `chunk_kda`, `mamba_chunk_scan`); all the rest treats each token by
itself and computes the row as it is. Here those functions follow the row's segments: the convolution reads a copy of
the row in which every segment begins with its window, and the scan computes the prompts first, then the responses,
whose initial states are those at the ends of their prompts. docs/decisions has the design and its limits.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.models.recurrent_layers import CONVOLUTION
from training.pairs.packing import PackedRow

FUSED = "mamba2_split_conv1d_scan_combined"  # convolution and scan in one kernel, without initial states
# By the function's name: its arguments for the initial states, and whether it returns the final ones.
SCANS = {
    "torch_chunk_gated_delta_rule": ("initial_state", "output_final_state"),
    "chunk_kimi_delta_attention": ("initial_state", "output_final_state"),
    "mamba2_chunk_scan": ("initial_states", "return_final_states"),
}
# Tokens that cost about as much as the kernel launches of one more batch; on a GPU an estimate, not a measurement.
BATCH_COST = {"cpu": 64, "cuda": 8192}
SMALLEST_CHUNK = 64  # of Mamba-2, in tokens; kernels are compiled for each size


@dataclass(frozen=True)
class Batch:
    """Sequences of a row: padded to equal lengths, or joined into one with `boundaries`."""

    shape: tuple[int, int]  # sequences and width
    is_token: Tensor | None  # (sequences, width); None if nothing has to be 0
    prompts: Tensor  # (sequences,) number of the prompt that a sequence continues
    boundaries: dict[str, Tensor]  # arguments of flash-linear-attention


@dataclass(frozen=True)
class Split:
    """A row's prompts and its responses, in batches."""

    prompts: list[Batch]
    responses: list[Batch]
    index: Tensor  # of the flattened batches, prompts first: tokens of the row
    positions: Tensor  # (tokens,) of the row's tokens in the flattened batches

    @property
    def sizes(self) -> list[int]:
        return [batch.shape[0] * batch.shape[1] for batch in [*self.prompts, *self.responses]]


@dataclass(frozen=True)
class Windows:
    """The copy of a row that a convolution reads: every segment begins with the tokens before it."""

    index: Tensor  # of the copy: tokens of the row
    empty: Tensor  # positions in the copy before the first token of a pair
    repeated: Tensor  # positions in the copy of tokens that it has twice
    positions: Tensor  # (tokens,) of the row's tokens in the copy


class RowSegments:
    """Where a row's prompts and responses are. A prefix that both responses share belongs to the prompt."""

    def __init__(self, row: PackedRow) -> None:
        self.device = row.input_ids.device
        self.lengths = np.array(row.part_lengths)  # (pairs, 3)
        self.starts = np.cumsum(self.lengths).reshape(self.lengths.shape) - self.lengths
        self._windows: dict[int, Windows] = {}

    def windows(self, size: int) -> Windows:
        """For a convolution of this size."""
        if size not in self._windows:
            self._windows[size] = Windows(*map(self._to_device, self._make_windows(size - 1)))
        return self._windows[size]

    def _make_windows(self, before: int) -> tuple[np.ndarray, ...]:
        prompts, chosen, rejected = self.lengths.T
        sizes = np.stack([before + prompts + chosen, before + rejected], 1).flatten()
        first = np.stack([self.starts[:, 0] - before, self.starts[:, 2] - before], 1).flatten()
        copied = np.repeat(first, sizes) + _offsets(sizes)
        is_window = _offsets(sizes) < before
        # The window of `rejected` is the end of the prompt, not of `chosen`.
        in_rejected = np.repeat(np.tile([False, True], len(prompts)), sizes)
        copied -= np.where(is_window & in_rejected, np.repeat(np.repeat(chosen, 2), sizes), 0)
        is_empty = is_window & (copied < np.repeat(np.repeat(self.starts[:, 0], 2), sizes))
        kinds = (is_empty, is_window & ~is_empty, ~is_window)
        return copied.clip(0), *(kind.nonzero()[0] for kind in kinds)

    @cached_property
    def joined(self) -> Split:
        """For kernels that take sequences of different lengths, one after the other."""
        pairs = len(self.lengths)
        parts = [(slice(0, 1), np.arange(pairs)), (slice(1, 3), np.repeat(np.arange(pairs), 2))]
        batches, indexes = [], []
        for columns, prompts in parts:
            lengths, starts = self.lengths[:, columns].flatten(), self.starts[:, columns].flatten()
            indexes.append(np.repeat(starts, lengths) + _offsets(lengths))
            ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
            boundaries = {"cu_seqlens": ends.to(self.device, non_blocking=True), "cu_seqlens_cpu": ends}
            batches.append(Batch((1, int(lengths.sum())), None, self._to_device(prompts), boundaries))
        index = np.concatenate(indexes)
        return Split(batches[:1], batches[1:], self._to_device(index), self._to_device(np.argsort(index)))

    @cached_property
    def padded(self) -> Split:
        """For functions that take sequences of one length. Prompts are padded at their beginnings, with 0, so that
        states are those after the last token; responses at their ends, where no token sees it."""
        cost, positions = BATCH_COST[self.device.type], np.empty(int(self.lengths.sum()), np.int64)
        members = padded_batches(self.lengths[:, 0], cost)
        number = np.argsort(np.concatenate(members))  # of each pair's prompt in the joined batches
        starts, lengths = self.starts[:, 1:].flatten(), self.lengths[:, 1:].flatten()
        parts = [(self.starts[m, 0], self.lengths[m, 0], number[m], True) for m in members]
        parts += [(starts[m], lengths[m], number[m // 2], False) for m in padded_batches(lengths, cost)]
        batches, indexes, before = [], [], 0
        for begin, length, prompts, pads_first in parts:
            offset = np.arange(length.max()) - (length.max() - length[:, None] if pads_first else 0)
            is_token = (offset >= 0) & (offset < length[:, None])
            index = begin[:, None] + offset.clip(0, length[:, None] - 1)
            positions[index[is_token]] = before + is_token.flatten().nonzero()[0]
            before += is_token.size
            indexes.append(index.flatten())
            mask = self._to_device(is_token) if pads_first and not is_token.all() else None
            batches.append(Batch(is_token.shape, mask, self._to_device(prompts), {}))
        index = self._to_device(np.concatenate(indexes))
        return Split(batches[: len(members)], batches[len(members) :], index, self._to_device(positions))

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


# Gathers whose gradients are gathers too: those of `index_select` add atomically, slowly and in no fixed order.


class Gather(torch.autograd.Function):
    """Tokens of a row in batches. Padding repeats tokens; its gradients are 0."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, index: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return row.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return gradient.index_select(0, positions), None, None


class Restore(torch.autograd.Function):
    """The row of tokens that are at these positions."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.shape = tokens.shape
        return tokens.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy_(0, positions, gradient), None


class WithWindows(torch.autograd.Function):
    """The copy of a row with windows."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, windows: Windows) -> Tensor:
        ctx.windows = windows
        return row.index_select(0, windows.index).index_fill_(0, windows.empty, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        windows = ctx.windows
        tokens = windows.index.index_select(0, windows.repeated)  # each of them once
        repeated = gradient.index_select(0, windows.repeated)
        return gradient.index_select(0, windows.positions).index_add_(0, tokens, repeated), None


def follow_segments(layers: list[nn.Module]) -> None:
    """Let the layers compute rows by `row_segments` where the model's forward gets them; other passes do not change."""
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
        _replace_functions(type(layer).__module__)


def _forward(
    layer: nn.Module, hidden_states: Tensor, *args: Any, row_segments: RowSegments | None = None, **options: Any
) -> Tensor:
    """Takes the place of the forward of a recurrent layer's class."""
    if row_segments is None:
        return type(layer).forward(layer, hidden_states, *args, **options)
    return type(layer).forward(layer, hidden_states, row_segments=row_segments)  # which it passes to the functions


@cache
def _replace_functions(module_name: str) -> None:
    """In transformers' module: functions that get `row_segments` follow them, others are called as before."""
    module = sys.modules[module_name]
    replaced: dict[str, Callable[..., Any]] = {CONVOLUTION: _convolve, FUSED: _skip, **dict.fromkeys(SCANS, _scan)}
    for name, follow in replaced.items():
        if hasattr(module, name):
            setattr(module, name, _following(getattr(module, name), follow))


def _following(function: Callable[..., Any], follow: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, row_segments: RowSegments | None = None, **options: Any) -> Any:
        if row_segments is None:
            return function(*args, **options)
        return follow(function, row_segments, *args, **options)

    return called


def _skip(function: Callable[..., Any], row_segments: RowSegments, *args: Any, **options: Any) -> None:
    """None makes a layer call the convolution and the scan."""


def _convolve(
    convolution: Callable[..., Tensor], row_segments: RowSegments, inputs: Tensor, *args: Any, **options: Any
) -> Tensor:
    """(1, channels, tokens). Tokens are selected where they are rows of memory."""
    weight = options["weight"] if "weight" in options else args[0]
    windows = row_segments.windows(weight.shape[-1])
    row = WithWindows.apply(inputs.transpose(1, 2)[0], windows)
    output = convolution(row[None].transpose(1, 2), *args, **options).transpose(1, 2)[0]
    return Restore.apply(output, windows.positions)[None].transpose(1, 2)


def _scan(
    scan: Callable[..., Any], row_segments: RowSegments, *args: Tensor, **options: Any
) -> tuple[Tensor, None] | Tensor:
    initial, returns_final = SCANS[scan.__name__]
    is_delta_rule = initial == "initial_state"
    row: Any = args[0]  # (1, tokens, heads, size)
    split = row_segments.joined if is_delta_rule and _takes_boundaries(row) else row_segments.padded

    def batches(value: Any) -> list[Any]:
        """An argument of each batch: tokens in place of the row."""
        if not (isinstance(value, Tensor) and value.dim() > 2 and value.shape[:2] == row.shape[:2]):
            return [value] * len(split.sizes)
        parts = Gather.apply(value[0], split.index, split.positions).split(split.sizes)
        return [_in_shape(part, batch) for part, batch in zip(parts, [*split.prompts, *split.responses], strict=True)]

    of_args, of_options = list(map(batches, args)), {name: batches(value) for name, value in options.items()}

    def compute(number: int, batch: Batch, **states: Any) -> Any:
        own = {name: values[number] for name, values in of_options.items()} | batch.boundaries | states
        if "chunk_size" in own:
            own["chunk_size"] = _chunk_size(own["chunk_size"], batch.shape[1])
        return scan(*(values[number] for values in of_args), **own)

    whole = {initial: None, returns_final: True}
    ends = [compute(number, batch, **whole) for number, batch in enumerate(split.prompts)]
    states = torch.cat([state for _, state in ends])
    outputs = [output for output, _ in ends]
    for number, batch in enumerate(split.responses, len(ends)):
        result = compute(number, batch, **{initial: _continued(states, batch), returns_final: False})
        outputs.append(result[0] if is_delta_rule else result)
    output = Restore.apply(torch.cat([part.flatten(0, 1) for part in outputs]), split.positions)[None]
    return (output, None) if is_delta_rule else output


def _continued(states: Tensor, batch: Batch) -> Tensor:
    """The states at the ends of the prompts that a batch of responses continues."""
    return states.index_select(0, batch.prompts)


def _takes_boundaries(row: Tensor) -> bool:
    """Whether transformers calls a kernel of flash-linear-attention, and not its own function."""
    return row.is_cuda and importlib.util.find_spec("fla") is not None


def _in_shape(tokens: Tensor, batch: Batch) -> Tensor:
    """(sequences, width, ...) with 0 in place of padding that would change a state"""
    values = tokens.unflatten(0, batch.shape)
    if batch.is_token is None:
        return values
    return values * batch.is_token.view(*batch.shape, *[1] * (values.dim() - 2))


def _chunk_size(own: int, width: int) -> int:
    """Mamba-2 computes whole chunks, often of 256 tokens, and most responses are shorter; results do not change."""
    return min(own, max(SMALLEST_CHUNK, 1 << (width - 1).bit_length()))


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... of each sequence"""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


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
