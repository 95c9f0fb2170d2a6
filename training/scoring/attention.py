"""Attention over packed rows, as a function that transformers' models call.

- On a GPU in half precision: FlashAttention with variable lengths. A pair is the sequence prompt + chosen, and the
  sequence of the rest of rejected, whose keys include the prompt again. This needs no mask and supports windows. Long
  sequences prompt + chosen take cuDNN's kernels, which are faster on a Hopper GPU (docs/decisions).
- On a CPU: SDPA on each of these sequences in turn. It computes only the causal half of the first sequence.
- Otherwise: SDPA with a dense mask, since many small calls would cost more. The pairs are a batch of blocks, or the row
  is one block if padding the pairs to equal lengths would cost more.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from training.distributed.sequence_parallel import SequenceGroup
from training.pairs.packing import PROMPT, PackedRow

PACKED_ATTENTION = "packed_rows"  # for set_attn_implementation; the model then accepts packed rows only
LONG = 4096  # tokens of a sequence from which cuDNN's kernels pay
LONG_ATTENTION = torch.ops.aten._scaled_dot_product_cudnn_attention.default
MAX_HEAD_SIZE = 128  # of cuDNN's backward pass


@dataclass(frozen=True)
class KernelCall:
    """Consecutive sequences of a row that one call of a kernel computes: a long one, or several others."""

    queries: int
    keys: int
    max_length: int
    cu_seqlens: tuple[Tensor, Tensor] | None  # None: one long sequence, whose queries and keys are the same tokens


def attention_inputs(row: PackedRow, flash: bool) -> dict[str, Any]:
    """Arguments of `attend`, to pass to the model's forward."""
    if flash:
        long = {"row_calls": kernel_calls(row)} if _has_long_kernels(row) else {}
        return {
            "row_key_index": row.key_index,
            "row_cu_seqlens_q": row.cu_seqlens_q,
            "row_cu_seqlens_k": row.cu_seqlens_k,
            "row_max_length": row.max_length,
            **long,
        }
    if row.key_index.device.type == "cpu":
        return {
            "row_key_index": row.key_index,
            "row_lengths": (row.cu_seqlens_q.diff().tolist(), row.cu_seqlens_k.diff().tolist()),
        }
    return blocks(row)


def supports_flash(device: torch.device, dtype: torch.dtype, softcap: float | None) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and softcap is None


def _has_long_kernels(row: PackedRow) -> bool:
    if row.max_length < LONG or torch.are_deterministic_algorithms_enabled():  # cuDNN's backward pass is not
        return False
    return torch.cuda.get_device_capability(row.key_index.device) >= (9, 0)


def kernel_calls(row: PackedRow) -> list[KernelCall]:
    """The row's sequences in order: each long one alone, those between them together."""
    lengths: list[tuple[int, int]] = []  # of queries and keys
    for prompt, chosen, rejected in row.part_lengths:
        lengths += [(prompt + chosen, prompt + chosen), (rejected, prompt + rejected)]
    long = [n for n, (queries, keys) in enumerate(lengths) if queries == keys >= LONG]
    calls = []
    for alone, group in groupby(range(len(lengths)), lambda n: n if n in long else None):
        numbers = list(group)
        queries, keys = zip(*(lengths[n] for n in numbers), strict=True)
        cu_seqlens = None
        if alone is None:
            first, end = numbers[0], numbers[-1] + 2
            cu_seqlens_q, cu_seqlens_k = row.cu_seqlens_q[first:end], row.cu_seqlens_k[first:end]
            cu_seqlens = (cu_seqlens_q - cu_seqlens_q[0], cu_seqlens_k - cu_seqlens_k[0])
        calls.append(KernelCall(sum(queries), sum(keys), max(keys), cu_seqlens))
    return calls


def row_mask(row: PackedRow) -> Tensor:
    """Dense mask, (queries, keys): earlier tokens of the same pair, in the prompt or in the same response."""
    same_pair = row.token_pair[:, None] == row.token_pair[None, :]
    return same_pair & _visible(row.token_part[None])[0]


def _visible(part: Tensor) -> Tensor:
    """(blocks, tokens) to (blocks, queries, keys): earlier tokens in the prompt or in the same part."""
    earlier = torch.ones(part.shape[1], part.shape[1], dtype=torch.bool, device=part.device).tril()
    return earlier & ((part[:, None, :] == PROMPT) | (part[:, :, None] == part[:, None, :]))


def blocks(row: PackedRow) -> dict[str, Tensor]:
    """Blocks of a pair each, padded by its first token; each token's position in the blocks; and the dense masks."""
    lengths = row.token_pair.bincount()
    count, longest, tokens = len(lengths), int(lengths.max()), len(row.token_pair)
    if count * longest**2 >= tokens**2:
        return {"row_mask": row_mask(row)[None], "row_positions": row.position_ids[None]}
    starts = lengths.cumsum(0) - lengths
    offset = torch.arange(longest, device=row.token_pair.device)
    is_token = offset < lengths[:, None]
    index = starts[:, None] + torch.where(is_token, offset, 0)
    positions = row.token_pair * longest + torch.arange(tokens, device=row.token_pair.device) - starts[row.token_pair]
    mask = _visible(row.token_part[index]) & is_token[:, None, :]
    return {
        "row_blocks": index,
        "row_block_positions": positions,
        "row_mask": mask,
        "row_positions": row.position_ids[index],
    }


def attend(
    module: nn.Module,
    query: Tensor,  # (1, heads, tokens, size)
    key: Tensor,  # (1, key heads, tokens, size)
    value: Tensor,
    attention_mask: Tensor | None,
    row_group: SequenceGroup | None = None,  # ranks that share the tokens of the row
    row_tokens: int = 0,
    **options: Any,
) -> tuple[Tensor, None]:
    if row_group is None:
        return _attend(module, query, key, value, **options), None
    query, key, value = row_group.to_heads(query, key, value, row_tokens)
    return row_group.to_tokens(_attend(module, query, key, value, **options)), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    row_key_index: Tensor | None = None,
    row_cu_seqlens_q: Tensor | None = None,
    row_cu_seqlens_k: Tensor | None = None,
    row_max_length: int = 0,
    row_calls: list[KernelCall] | None = None,
    row_lengths: tuple[list[int], list[int]] | None = None,
    row_blocks: Tensor | None = None,
    row_block_positions: Tensor | None = None,
    row_mask: Tensor | None = None,
    row_positions: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """(1, tokens, heads, size)."""
    if row_key_index is not None and row_lengths is not None:
        return _by_sequence(query, key, value, row_key_index, row_lengths, scaling, sliding_window, softcap)
    if row_key_index is not None and row_calls and sliding_window is None and query.shape[-1] <= MAX_HEAD_SIZE:
        return _by_call(query[0], key[0], value[0], row_key_index, row_calls, scaling)[None]
    if row_key_index is not None:
        cu_seqlens = row_cu_seqlens_q, row_cu_seqlens_k
        out = _flash(query[0], key[0], value[0], row_key_index, cu_seqlens, row_max_length, scaling, sliding_window)
        return out[None]
    if row_mask is None or row_positions is None:  # a pass without a row, or a model that drops the arguments
        raise ValueError(f"{type(module).__name__} got no packed row")
    if sliding_window is not None:
        row_mask = row_mask & (row_positions[:, :, None] - row_positions[:, None, :] < sliding_window)
    if row_blocks is not None:
        query, key, value = (_to_blocks(part, row_blocks) for part in (query, key, value))
    out = _dense(query, key, value, row_mask[:, None], scaling, softcap).transpose(1, 2)
    if row_block_positions is not None:
        out = out.flatten(0, 1).index_select(0, row_block_positions)[None]
    return out


def _to_blocks(part: Tensor, index: Tensor) -> Tensor:
    """(1, heads, tokens, size) to (blocks, heads, tokens of a block, size)."""
    tokens = part[0].transpose(0, 1).index_select(0, index.flatten())
    return tokens.unflatten(0, index.shape).transpose(1, 2)


def _by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_index: Tensor,
    lengths: tuple[list[int], list[int]],  # of the queries and keys of each sequence
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """(1, tokens, heads, size)."""
    key, value = key.index_select(2, key_index), value.index_select(2, key_index)
    parts = query.split(lengths[0], 2), key.split(lengths[1], 2), value.split(lengths[1], 2)
    out = []
    for queries, keys, values in zip(*parts, strict=True):
        mask = _causal_mask(queries.shape[2], keys.shape[2], window)
        out.append(_dense(queries, keys, values, mask, scaling, softcap))
    return torch.cat(out, 2).transpose(1, 2)


def _causal_mask(queries: int, keys: int, window: int | None) -> Tensor | None:
    """Causal mask, aligned at the last query and key; None for the square mask that SDPA has built in."""
    if queries == keys and (window is None or keys <= window):
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)


@torch.compiler.disable  # or each number of calls would be a graph
def _by_call(
    query: Tensor, key: Tensor, value: Tensor, key_index: Tensor, parts: list[KernelCall], scaling: float | None
) -> Tensor:
    """(tokens, heads, size)."""
    out = []
    token = used = 0
    for part in parts:
        queries, keys = slice(token, token + part.queries), slice(used, used + part.keys)
        token, used = queries.stop, keys.stop
        if part.cu_seqlens is None:
            out.append(_long(query[:, queries], key[:, queries], value[:, queries], scaling))
            continue
        index = key_index[keys]
        out.append(_flash(query[:, queries], key, value, index, part.cu_seqlens, part.max_length, scaling, None))
    return torch.cat(out)


def _long(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """(tokens, heads, size), causal."""
    size = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - size))
    out = LONG_ATTENTION(query[None], key[None], value[None], None, True, 0.0, True, False, scale=scaling)[0][0]
    return out[..., :size].transpose(0, 1)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_index: Tensor,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    max_length: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """(tokens, heads, size). FlashAttention aligns a causal mask at the last query and key."""
    query, key, value = query.transpose(0, 1), key.transpose(0, 1)[key_index], value.transpose(0, 1)[key_index]
    size = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - size))  # DeepSeek's values are smaller than its queries
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *cu_seqlens,
        max_length,
        max_length,
        0.0,
        window is None,
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0][..., :size]


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    if softcap is None:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


AttentionInterface.register(PACKED_ATTENTION, attend)
