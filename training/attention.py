"""Attention over packed rows: which token sees which, as one function that transformers' models call.

On a GPU in half precision it is FlashAttention over variable lengths: each pair is the sequence prompt + chosen, and
the sequence rejected, whose keys are the prompt's again and its own. That is the row's mask without a mask: nothing to
build, nothing to compile, a sliding window included. On a CPU SDPA gets the same sequences one by one, and computes of
the first no more than its causal half. Elsewhere, where so many calls would cost more than they save, SDPA gets the
row's pairs as a batch of blocks with a dense mask each, or the row as one block where its pairs are too unlike for that
to be less work.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from training.packing import PROMPT, Row

NAME = "packed_rows"  # for set_attn_implementation; a model can do nothing else then


def row_inputs(row: Row, flash: bool) -> dict[str, Any]:
    """What a forward pass over a row takes beside the model's own arguments, for `attend`."""
    if flash:
        return {
            "row_keys": row.keys,
            "row_query_ends": row.query_ends,
            "row_key_ends": row.key_ends,
            "row_longest": row.longest,
        }
    if row.keys.device.type == "cpu":
        return {"row_keys": row.keys, "row_lengths": (row.query_ends.diff().tolist(), row.key_ends.diff().tolist())}
    return blocks(row)


def can_flash(device: torch.device, dtype: torch.dtype, softcap: float | None) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and softcap is None


def row_mask(row: Row) -> Tensor:
    """Dense mask, (queries, keys): earlier tokens of the own pair, of its prompt or of the own response."""
    same_pair = row.pair[:, None] == row.pair[None, :]
    return same_pair & _visible(row.part[None])[0]


def _visible(part: Tensor) -> Tensor:
    """(blocks, tokens) to (blocks, queries, keys): earlier tokens of a prompt, or of the same part."""
    earlier = torch.ones(part.shape[1], part.shape[1], dtype=torch.bool, device=part.device).tril()
    return earlier & ((part[:, None, :] == PROMPT) | (part[:, :, None] == part[:, None, :]))


def blocks(row: Row) -> dict[str, Tensor]:
    """Which tokens make up each block (padded with a block's first), where a token went, and who sees whom there."""
    lengths = row.pair.bincount()
    count, longest, tokens = len(lengths), int(lengths.max()), len(row.pair)
    if count * longest**2 >= tokens**2:
        return {"row_mask": row_mask(row)[None], "row_positions": row.position_ids[None]}
    starts = lengths.cumsum(0) - lengths
    within = torch.arange(longest, device=row.pair.device)
    real = within < lengths[:, None]
    index = starts[:, None] + torch.where(real, within, 0)
    places = row.pair * longest + torch.arange(tokens, device=row.pair.device) - starts[row.pair]
    mask = _visible(row.part[index]) & real[:, None, :]
    return {"row_blocks": index, "row_places": places, "row_mask": mask, "row_positions": row.position_ids[index]}


def attend(
    module: nn.Module,
    query: Tensor,  # (1, heads, tokens, size)
    key: Tensor,  # (1, key heads, tokens, size)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    row_keys: Tensor | None = None,
    row_query_ends: Tensor | None = None,
    row_key_ends: Tensor | None = None,
    row_longest: int = 0,
    row_lengths: tuple[list[int], list[int]] | None = None,
    row_blocks: Tensor | None = None,
    row_places: Tensor | None = None,
    row_mask: Tensor | None = None,
    row_positions: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if row_keys is not None and row_lengths is not None:
        return _one_by_one(query, key, value, row_keys, row_lengths, scaling, sliding_window, softcap), None
    if row_keys is not None:
        ends = row_query_ends, row_key_ends
        out = _flash(query[0], key[0], value[0], row_keys, ends, row_longest, scaling, sliding_window)
        return out[None], None
    if row_mask is None or row_positions is None:  # an ordinary pass, or a model that does not hand the row on
        raise ValueError(f"{type(module).__name__} was not given a packed row")
    if sliding_window is not None:
        row_mask = row_mask & (row_positions[:, :, None] - row_positions[:, None, :] < sliding_window)
    if row_blocks is not None:
        query, key, value = (_to_blocks(part, row_blocks) for part in (query, key, value))
    out = _dense(query, key, value, row_mask[:, None], scaling, softcap).transpose(1, 2)
    if row_places is not None:
        out = out.flatten(0, 1).index_select(0, row_places)[None]
    return out, None


def _to_blocks(part: Tensor, index: Tensor) -> Tensor:
    """(1, heads, tokens, size) to (blocks, heads, tokens of a block, size)."""
    chosen = part[0].transpose(0, 1).index_select(0, index.flatten())
    return chosen.unflatten(0, index.shape).transpose(1, 2)


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    lengths: tuple[list[int], list[int]],  # queries and keys of each sequence
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """(1, tokens, heads, size)."""
    key, value = key.index_select(2, keys), value.index_select(2, keys)
    parts = query.split(lengths[0], 2), key.split(lengths[1], 2), value.split(lengths[1], 2)
    out = []
    for queries, seen, values in zip(*parts, strict=True):
        mask = _causal(queries.shape[2], seen.shape[2], window)
        out.append(_dense(queries, seen, values, mask, scaling, softcap))
    return torch.cat(out, 2).transpose(1, 2)


def _causal(queries: int, keys: int, window: int | None) -> Tensor | None:
    """Who sees whom, aligned at the ends; None for the plain half, of which SDPA knows."""
    if queries == keys and (window is None or keys <= window):
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    ends: tuple[Tensor | None, Tensor | None],
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """(tokens, heads, size). Causal masks of FlashAttention are aligned at the ends of queries and keys."""
    query, key, value = query.transpose(0, 1), key.transpose(0, 1)[keys], value.transpose(0, 1)[keys]
    size = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - size))  # DeepSeek's values are shorter than its queries
    left = None if window is None else window - 1
    right = None if window is None else 0
    return torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        ends[0],
        ends[1],
        longest,
        longest,
        0.0,
        window is None,
        False,
        scale=scaling,
        window_size_left=left,
        window_size_right=right,
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


AttentionInterface.register(NAME, attend)
