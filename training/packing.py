"""Rows: pairs packed back to back as [prompt, chosen, rejected], so that each prompt is computed once.

Positions restart with every pair and the rejected response continues the prompt's positions. Log-probabilities are
wanted only where they count: `predict` holds the positions whose hidden state predicts a response token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Ints = Sequence[int] | np.ndarray
Floats = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Pair:
    """One tokenised preference; a mask is 1 where a response token counts. The reference is per response token."""

    id: str
    prompt: Ints
    chosen: Ints
    rejected: Ints
    chosen_mask: Ints
    rejected_mask: Ints
    ref_chosen: Floats | None = None
    ref_rejected: Floats | None = None
    label: float = 1.0  # how probably chosen is the better one; 0.5 is a tie
    margin: float = 0.0  # by how much its reward should be higher
    weight: float = 1.0  # how much the pair counts

    def __len__(self) -> int:
        return len(self.prompt) + len(self.chosen) + len(self.rejected)

    @property
    def attended(self) -> int:
        """How many tokens are seen by all of its tokens together: the attention's share of the cost."""
        n, c, r = len(self.prompt), len(self.chosen), len(self.rejected)
        return (n + c) * (n + c + 1) // 2 + n * r + r * (r + 1) // 2


PROMPT, CHOSEN, REJECTED = 0, 1, 2


@dataclass(frozen=True)
class Row:
    """A packed row. Response r of the row's pair p is numbered 2p (chosen) or 2p + 1 (rejected).

    For attention each pair is two sequences: prompt and chosen, which see themselves, and rejected, which sees the
    prompt too. `keys` are the tokens that the sequences see, one after the other, the prompt's a second time for the
    rejected response; `query_ends` and `key_ends` are where each sequence begins and ends.
    """

    pairs: tuple[int, ...]  # which pairs, as numbers of the caller's list
    longest: int  # tokens of the longest sequence
    soft: bool  # whether a label is not 1
    input_ids: Tensor  # (tokens,)
    position_ids: Tensor  # (tokens,)
    pair: Tensor  # (tokens,) the row's pair that a token belongs to
    part: Tensor  # (tokens,) PROMPT, CHOSEN or REJECTED
    keys: Tensor  # (keys,)
    query_ends: Tensor  # (2 pairs + 1,) int32
    key_ends: Tensor  # (2 pairs + 1,) int32
    predict: Tensor  # (targets,) position that predicts each response token
    targets: Tensor  # (targets,) the response tokens
    response: Tensor  # (targets,) the response that each belongs to
    counts: Tensor  # (targets,) 1.0 where the token counts
    order: Tensor  # (targets,) counted tokens of its response before it
    reference: Tensor  # (targets,) the reference's log-probability; zeros without a reference
    label: Tensor  # (pairs,)
    margin: Tensor  # (pairs,)
    weight: Tensor  # (pairs,)

    def to(self, device: torch.device) -> "Row":
        """On the device; from pinned memory without waiting for it."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Row":
        return self._with(lambda tensor: tensor.pin_memory())

    def _with(self, change: Callable[[Tensor], Tensor]) -> "Row":
        changed: dict[str, Any] = {n: change(value) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed)

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum values (targets,) over the tokens of each response: chosen and rejected, (pairs,) each."""
        totals = values.new_zeros(2 * len(self.pairs)).index_add(0, self.response, values)
        return totals[0::2], totals[1::2]


def pack(costs: Sequence[float], lengths: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Numbers of items by row, as even in cost as they go; no row above the budget (a longer item gets its own).

    The number of rows is a multiple of `multiple`, so that as many ranks get equally many; it is the smallest for
    which the longest-first rule finds room. A row stays empty only where there are fewer items than rows.
    """
    wanted = max(1, math.ceil(sum(min(length, budget) for length in lengths) / budget))
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    for count in range(math.ceil(wanted / multiple) * multiple, len(lengths) + multiple, multiple):
        rows = _even(order, costs, lengths, budget, count)
        if rows is not None:
            return rows
    return [[item] for item in order] + [[] for _ in range(-len(order) % multiple)]


def _even(
    order: Sequence[int], costs: Sequence[float], lengths: Sequence[int], budget: int, count: int
) -> list[list[int]] | None:
    rows: list[list[int]] = [[] for _ in range(count)]
    cost, tokens = [0.0] * count, [0] * count
    for item in order:
        open_rows = [r for r in range(count) if not rows[r] or tokens[r] + lengths[item] <= budget]
        if not open_rows:
            return None
        place = min(open_rows, key=lambda r: (cost[r], r))
        rows[place].append(item)
        cost[place] += costs[item]
        tokens[place] += lengths[item]
    return rows


def build_row(pairs: Sequence[Pair], numbers: Sequence[int]) -> Row:
    """Lay pairs[n] for n in numbers into one row."""
    members = [pairs[number] for number in numbers]
    blocks, offset = [], 0
    for order, pair in enumerate(members):
        blocks.append(_block(pair, order, offset))
        offset += len(pair)
    columns = {name: torch.from_numpy(np.concatenate([block[name] for block in blocks])) for name in blocks[0]}
    ends = {name: torch.from_numpy(_ends(columns.pop(name).numpy())) for name in ("query_ends", "key_ends")}
    per_pair = {name: torch.tensor([getattr(p, name) for p in members]) for name in ("label", "margin", "weight")}
    longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in members)
    soft = any(pair.label != 1.0 for pair in members)
    return Row(pairs=tuple(numbers), longest=longest, soft=soft, **ends, **columns, **per_pair)


def _block(pair: Pair, order: int, offset: int) -> dict[str, np.ndarray]:
    n, c, r = len(pair.prompt), len(pair.chosen), len(pair.rejected)
    assert min(n, c, r) > 0, f"pair {pair.id} has an empty part"
    reference = np.zeros(c + r) if pair.ref_chosen is None else _join(pair.ref_chosen, pair.ref_rejected)
    assert len(reference) == c + r, f"pair {pair.id}: {len(reference)} reference values for {c + r} tokens"
    counts = np.asarray(pair.chosen_mask, dtype=np.float32), np.asarray(pair.rejected_mask, dtype=np.float32)
    whole = np.arange(n + c + r)
    # The prompt's last token predicts the first token of both responses.
    predict = np.concatenate([whole[n - 1 : n + c - 1], whole[n - 1 : n], whole[n + c : n + c + r - 1]])
    return {
        "input_ids": _join(pair.prompt, pair.chosen, pair.rejected).astype(np.int64),
        "position_ids": np.concatenate([whole[: n + c], whole[n : n + r]]),
        "pair": np.full(n + c + r, order),
        "part": np.repeat([PROMPT, CHOSEN, REJECTED], [n, c, r]),
        "keys": offset + np.concatenate([whole[: n + c], whole[:n], whole[n + c :]]),
        "query_ends": np.array([n + c, r]),  # lengths here, summed up over the row
        "key_ends": np.array([n + c, n + r]),
        "predict": offset + predict,
        "targets": _join(pair.chosen, pair.rejected).astype(np.int64),
        "response": np.repeat([2 * order, 2 * order + 1], [c, r]),
        "counts": np.concatenate(counts),
        "order": np.concatenate([np.cumsum(counted) - counted for counted in counts]),
        "reference": reference.astype(np.float32),
    }


def _join(*parts: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])


def _ends(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
