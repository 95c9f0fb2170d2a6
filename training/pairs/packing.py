"""Prefix sharing: pairs are packed into rows as [prompt, chosen, rejected], so that a prompt is computed once.

A prefix that both responses share is computed once, too. The rejected response continues from the end of the shared
prefix: its first own token gets the next position id and attends to the prompt and the prefix. Position ids restart
with every pair. `predict_positions` are the positions whose hidden states predict response tokens; the vocabulary head
runs on them alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.pairs.pair import Pair

PROMPT, CHOSEN, REJECTED = 0, 1, 2  # PROMPT includes the shared prefix


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """Pairs in one sequence. Of the row's pair p, the chosen response has index 2p and the rejected one 2p + 1.

    For attention, a pair is two sequences: prompt + chosen, and the rejected response after the shared prefix. The
    keys of the second sequence include the prompt and the prefix. `key_index` concatenates the keys of all sequences;
    `cu_seqlens_q` and `cu_seqlens_k` are the cumulative sequence lengths, as FlashAttention takes them.
    """

    pair_indices: tuple[int, ...]  # into the caller's list of pairs
    part_lengths: tuple[tuple[int, int, int], ...]  # of each pair: PROMPT, CHOSEN and REJECTED tokens
    max_length: int  # of a sequence, in tokens
    has_soft_labels: bool  # whether any label is not 1
    is_unpaired: bool  # whether the pairs are unpaired rows (Pair.sign)
    is_filler: bool  # a repeated pair for a rank without work; losses and metrics ignore it
    input_ids: Tensor  # (tokens,)
    position_ids: Tensor  # (tokens,)
    token_pair: Tensor  # (tokens,) pair of the token, numbered from 0 in this row
    token_part: Tensor  # (tokens,) PROMPT, CHOSEN or REJECTED
    key_index: Tensor  # (keys,) tokens of the row
    cu_seqlens_q: Tensor  # (2 pairs + 1,) int32
    cu_seqlens_k: Tensor  # (2 pairs + 1,) int32
    predict_positions: Tensor  # (targets,)
    target_ids: Tensor  # (targets,) chosen, then rejected after the shared prefix
    target_index: Tensor  # (response tokens,) into the targets; a shared prefix appears twice
    response_index: Tensor  # (response tokens,) 2p or 2p + 1
    loss_mask: Tensor  # (response tokens,) 1.0 for tokens in the loss
    counted_before: Tensor  # (response tokens,) earlier tokens of the same response in the loss
    ref_logps: Tensor  # (response tokens,) zeros without a reference
    label: Tensor  # (pairs,)
    margin: Tensor  # (pairs,)
    weight: Tensor  # (pairs,)
    sign: Tensor  # (pairs,)

    def to(self, device: torch.device) -> "PackedRow":
        """Copy to the device; asynchronous from pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "PackedRow":
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> "PackedRow":
        changed: dict[str, Any] = {n: function(value) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed)

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum values (response tokens,) by response in float64: chosen and rejected sums, (pairs,) each.

        A log-ratio is the small difference of two large sums: in float32, 131,072 tokens would move it by a nat.
        """
        totals = values.new_zeros(2 * len(self.pair_indices), dtype=torch.float64)
        totals = totals.index_add(0, self.response_index, values.double())
        return totals[0::2], totals[1::2]


def build_row(pairs: Sequence[Pair], indices: Sequence[int], is_filler: bool = False) -> PackedRow:
    """Pack pairs[i] for each i in `indices` into one row."""
    members = [pairs[index] for index in indices]
    columns: dict[str, list[np.ndarray]] = {}
    tokens = targets = 0
    for number, pair in enumerate(members):
        for name, values in _columns(pair, number, tokens, targets).items():
            columns.setdefault(name, []).append(values)
        tokens += len(pair)
        targets += pair.target_count
    joined: dict[str, Any] = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    for name in ("label", "margin", "weight", "sign"):
        joined[name] = torch.tensor([getattr(pair, name) for pair in members])
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        joined[name] = nn.functional.pad(joined[name].cumsum(0), (1, 0)).int()
    return PackedRow(
        pair_indices=tuple(indices),
        part_lengths=tuple(map(_part_lengths, members)),
        max_length=max(len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in members),
        has_soft_labels=any(pair.label != 1.0 for pair in members),
        is_unpaired=any(pair.sign for pair in members),
        is_filler=is_filler,
        **joined,
    )


def _part_lengths(pair: Pair) -> tuple[int, int, int]:
    shared = pair.shared_prefix
    return len(pair.prompt_ids) + shared, len(pair.chosen_ids) - shared, len(pair.rejected_ids) - shared


def _columns(pair: Pair, number: int, tokens: int, targets: int) -> dict[str, np.ndarray]:
    """A pair's part of each tensor of a row, after `tokens` tokens and `targets` targets of other pairs."""
    n, c, r, shared = len(pair.prompt_ids), len(pair.chosen_ids), len(pair.rejected_ids), pair.shared_prefix
    assert min(n, c, r) > 0, f"pair {pair.id} has an empty part"
    has_reference = pair.ref_chosen_logps is not None
    ref_logps = _join(pair.ref_chosen_logps, pair.ref_rejected_logps) if has_reference else np.zeros(c + r)
    assert len(ref_logps) == c + r, f"pair {pair.id}: {len(ref_logps)} reference values, not {c + r}"
    masks = np.asarray(pair.chosen_mask, dtype=np.float32), np.asarray(pair.rejected_mask, dtype=np.float32)
    first, prefix, rest = n + c, n + shared, r - shared
    position = np.arange(first + rest)
    # The last token of the prefix predicts two tokens: the next one of chosen and the next one of rejected.
    predict = np.concatenate([position[n - 1 : first - 1], position[prefix - 1 : prefix], position[first:-1]])
    target = np.arange(pair.target_count)
    responses = _join(pair.chosen_ids, pair.rejected_ids[shared:]).astype(np.int64)
    return {
        "input_ids": _join(pair.prompt_ids, responses).astype(np.int64),
        "position_ids": np.concatenate([position[:first], position[prefix : n + r]]),
        "token_pair": np.full(len(position), number),
        "token_part": np.repeat([PROMPT, CHOSEN, REJECTED], _part_lengths(pair)),
        "key_index": tokens + np.concatenate([position[:first], position[:prefix], position[first:]]),
        "cu_seqlens_q": np.array([first, rest]),  # lengths; build_row sums them up
        "cu_seqlens_k": np.array([first, n + r]),
        "predict_positions": tokens + predict,
        "target_ids": responses,
        "target_index": targets + np.concatenate([target[:c], target[:shared], target[c:]]),
        "response_index": np.repeat([2 * number, 2 * number + 1], [c, r]),
        "loss_mask": np.concatenate(masks),
        "counted_before": np.concatenate([np.cumsum(mask) - mask for mask in masks]),
        "ref_logps": ref_logps.astype(np.float32),
    }


def _join(*parts: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])
