"""Rows: pairs packed back to back as [prompt, chosen, rejected], so that each prompt is computed once.

Positions restart with every pair and the rejected response continues the prompt's positions. Log-probabilities are
wanted only where they count: `predict` holds the positions whose hidden state predicts a response token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """One tokenised preference; a mask is 1 where a response token counts. The reference is per response token."""

    id: str
    prompt: Sequence[int]
    chosen: Sequence[int]
    rejected: Sequence[int]
    chosen_mask: Sequence[int]
    rejected_mask: Sequence[int]
    ref_chosen: Sequence[float] | None = None
    ref_rejected: Sequence[float] | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


PROMPT, CHOSEN, REJECTED = 0, 1, 2


@dataclass(frozen=True)
class Row:
    """A packed row. Response r of the row's pair p is numbered 2p (chosen) or 2p + 1 (rejected)."""

    pairs: tuple[int, ...]  # which pairs, as numbers of the caller's list
    input_ids: Tensor  # (tokens,)
    position_ids: Tensor  # (tokens,)
    pair: Tensor  # (tokens,) the row's pair that a token belongs to
    part: Tensor  # (tokens,) PROMPT, CHOSEN or REJECTED
    predict: Tensor  # (targets,) position that predicts each response token
    targets: Tensor  # (targets,) the response tokens
    response: Tensor  # (targets,) the response that each belongs to
    counts: Tensor  # (targets,) 1.0 where the token counts
    reference: Tensor  # (targets,) the reference's log-probability; zeros without a reference

    def to(self, device: torch.device) -> "Row":
        moved: dict[str, Any] = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum values (targets,) over the counted tokens of each response: chosen and rejected, (pairs,) each."""
        totals = values.new_zeros(2 * len(self.pairs)).index_add(0, self.response, values * self.counts)
        return totals[0::2], totals[1::2]


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: numbers of items by row, no row above the budget (a longer item gets its own)."""
    rows: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((r for r, left in enumerate(room) if left >= lengths[item]), None)
        if place is None:
            rows.append([])
            room.append(budget)
            place = len(rows) - 1
        rows[place].append(item)
        room[place] -= lengths[item]
    return rows


def build_row(pairs: Sequence[Pair], numbers: Sequence[int]) -> Row:
    """Lay pairs[n] for n in numbers into one row."""
    blocks = [_block(pairs[number], order) for order, number in enumerate(numbers)]
    offsets = torch.tensor([0] + [len(block["input_ids"]) for block in blocks[:-1]]).cumsum(0)
    for block, offset in zip(blocks, offsets, strict=True):
        block["predict"] = block["predict"] + offset
    return Row(pairs=tuple(numbers), **{name: torch.cat([block[name] for block in blocks]) for name in blocks[0]})


def _block(pair: Pair, order: int) -> dict[str, Tensor]:
    n, c, r = len(pair.prompt), len(pair.chosen), len(pair.rejected)
    assert min(n, c, r) > 0, f"pair {pair.id} has an empty part"
    reference = [0.0] * (c + r) if pair.ref_chosen is None else [*pair.ref_chosen, *(pair.ref_rejected or ())]
    assert len(reference) == c + r, f"pair {pair.id}: {len(reference)} reference values for {c + r} tokens"
    return {
        "input_ids": torch.tensor([*pair.prompt, *pair.chosen, *pair.rejected]),
        "position_ids": torch.tensor([*range(n + c), *range(n, n + r)]),
        "pair": torch.full((n + c + r,), order),
        "part": torch.tensor([PROMPT] * n + [CHOSEN] * c + [REJECTED] * r),
        # The prompt's last token predicts the first token of both responses.
        "predict": torch.tensor([*range(n - 1, n + c - 1), n - 1, *range(n + c, n + c + r - 1)]),
        "targets": torch.tensor([*pair.chosen, *pair.rejected]),
        "response": torch.tensor([2 * order] * c + [2 * order + 1] * r),
        "counts": torch.tensor([*pair.chosen_mask, *pair.rejected_mask], dtype=torch.float32),
        "reference": torch.tensor(reference, dtype=torch.float32),
    }
