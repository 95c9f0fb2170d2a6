"""Rows: pairs packed back to back as [prompt, chosen, rejected], so that each prompt is computed once.

So are tokens that both responses begin with: the rejected response continues where it parts from the chosen one, in
positions and in what it sees. Positions restart with every pair. Log-probabilities are wanted only where they count:
`predict` holds the positions whose hidden state predicts a response token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
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
    _: KW_ONLY
    ref_chosen: Floats | None = None
    ref_rejected: Floats | None = None
    label: float = 1.0  # how probably chosen is the better one; 0.5 is a tie
    margin: float = 0.0  # by how much chosen scores higher, where the data has scores
    weight: float = 1.0  # how much the pair counts

    def __len__(self) -> int:
        """Tokens to compute."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected) - self.shared

    @cached_property
    def shared(self) -> int:
        """Tokens that both responses begin with; each keeps at least its last one for itself."""
        most = max(0, min(len(self.chosen), len(self.rejected)) - 1)
        differ = np.flatnonzero(np.asarray(self.chosen)[:most] != np.asarray(self.rejected)[:most])
        return int(differ[0]) if len(differ) else most

    @property
    def targets(self) -> int:
        """Response tokens to predict."""
        return len(self) - len(self.prompt)

    @property
    def attended(self) -> int:
        """How many tokens are seen by all of its tokens together: the attention's share of the cost."""
        first, stem = len(self.prompt) + len(self.chosen), len(self.prompt) + self.shared
        own = len(self.rejected) - self.shared
        return first * (first + 1) // 2 + stem * own + own * (own + 1) // 2


PROMPT, CHOSEN, REJECTED = 0, 1, 2  # what both responses begin with belongs to the prompt here


@dataclass(frozen=True, kw_only=True)
class Row:
    """A packed row. Response r of the row's pair p is numbered 2p (chosen) or 2p + 1 (rejected).

    For attention each pair is two sequences: prompt and chosen, which see themselves, and the rest of rejected, which
    sees what comes before it too. `keys` are the tokens that the sequences see, one after the other, the common ones a
    second time for the rejected response; `query_ends` and `key_ends` are where each sequence begins and ends.
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
    predict: Tensor  # (targets,) position that predicts each target
    targets: Tensor  # (targets,) the chosen tokens and those of the rejected that are its own
    copies: Tensor  # (response tokens,) which target each is: what is shared comes twice
    response: Tensor  # (response tokens,) the response that each belongs to
    counts: Tensor  # (response tokens,) 1.0 where the token counts
    order: Tensor  # (response tokens,) counted tokens of its response before it
    reference: Tensor  # (response tokens,) the reference's log-probability; zeros without a reference
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
        """Sum values (response tokens,) over the tokens of each response: chosen and rejected, (pairs,) each."""
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
    blocks, tokens, targets = [], 0, 0
    for order, pair in enumerate(members):
        blocks.append(_block(pair, order, tokens, targets))
        tokens += len(pair)
        targets += pair.targets
    columns = {name: torch.from_numpy(np.concatenate([block[name] for block in blocks])) for name in blocks[0]}
    ends = {name: torch.from_numpy(_ends(columns.pop(name).numpy())) for name in ("query_ends", "key_ends")}
    per_pair = {name: torch.tensor([getattr(p, name) for p in members]) for name in ("label", "margin", "weight")}
    longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in members)
    soft = any(pair.label != 1.0 for pair in members)
    return Row(pairs=tuple(numbers), longest=longest, soft=soft, **ends, **columns, **per_pair)


def _block(pair: Pair, order: int, tokens: int, targets: int) -> dict[str, np.ndarray]:
    n, c, r = len(pair.prompt), len(pair.chosen), len(pair.rejected)
    assert min(n, c, r) > 0, f"pair {pair.id} has an empty part"
    reference = np.zeros(c + r) if pair.ref_chosen is None else _join(pair.ref_chosen, pair.ref_rejected)
    assert len(reference) == c + r, f"pair {pair.id}: {len(reference)} reference values for {c + r} tokens"
    counts = np.asarray(pair.chosen_mask, dtype=np.float32), np.asarray(pair.rejected_mask, dtype=np.float32)
    first, stem, own = n + c, n + pair.shared, r - pair.shared
    whole = np.arange(first + own)
    # The stem's last token predicts the first of both that they do not share.
    predict = np.concatenate([whole[n - 1 : first - 1], whole[stem - 1 : stem], whole[first:-1]])
    each = np.arange(pair.targets)
    return {
        "input_ids": _join(pair.prompt, pair.chosen, pair.rejected[pair.shared :]).astype(np.int64),
        "position_ids": np.concatenate([whole[:first], whole[stem : n + r]]),
        "pair": np.full(len(whole), order),
        "part": np.repeat([PROMPT, CHOSEN, REJECTED], [stem, first - stem, own]),
        "keys": tokens + np.concatenate([whole[:first], whole[:stem], whole[first:]]),
        "query_ends": np.array([first, own]),  # lengths here, summed up over the row
        "key_ends": np.array([first, n + r]),
        "predict": tokens + predict,
        "targets": _join(pair.chosen, pair.rejected[pair.shared :]).astype(np.int64),
        "copies": targets + np.concatenate([each[:c], each[: pair.shared], each[c:]]),
        "response": np.repeat([2 * order, 2 * order + 1], [c, r]),
        "counts": np.concatenate(counts),
        "order": np.concatenate([np.cumsum(counted) - counted for counted in counts]),
        "reference": reference.astype(np.float32),
    }


def _join(*parts: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])


def _ends(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
