"""The three ways to attend over a row without a GPU's kernel say the same as its mask."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.models.attention import attend, attention_inputs, blocks, row_mask
from training.objectives.packing import PackedRow, build_row
from training.objectives.pair import Pair

ALIKE = [(5, 3, 4), (4, 4, 4), (6, 2, 3)]
UNLIKE = [(40, 3, 2), (1, 1, 1), (2, 5, 1)]


def row_of(lengths: list[tuple[int, int, int]]) -> PackedRow:
    """The responses of every other pair begin with three tokens more, the same."""
    starts = [[4] * (3 * (number % 2)) for number in range(len(lengths))]
    pairs = [Pair("", [1] * n, s + [2] * c, s + [3] * r, [], []) for s, (n, c, r) in zip(starts, lengths, strict=True)]
    return build_row(pairs, range(len(pairs)))


def by_mask(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, window: int | None, softcap: float | None
) -> Tensor:
    """The definition, on the whole row."""
    mask = row_mask(row)
    if window is not None:
        mask = mask & (row.position_ids[:, None] - row.position_ids[None, :] < window)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("lengths", [ALIKE, UNLIKE])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_way_is_the_mask(lengths: list[tuple[int, int, int]], window: int | None, softcap: float | None) -> None:
    row = row_of(lengths)
    shape = (1, 2, len(row.token_pair), 8)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    query = torch.randn(1, 4, *shape[2:], generator=generator, dtype=torch.float64)
    expected = by_mask(query, key, value, row, window, softcap)
    ways: list[dict[str, Any]] = [attention_inputs(row, flash=False), blocks(row)]
    assert "row_lengths" in ways[0]
    for inputs in ways:
        out, _ = attend(nn.Module(), query, key, value, None, sliding_window=window, softcap=softcap, **inputs)
        torch.testing.assert_close(out, expected)


def test_pairs_that_are_alike_become_blocks_and_others_one() -> None:
    assert "row_blocks" in blocks(row_of(ALIKE))
    assert "row_blocks" not in blocks(row_of(UNLIKE))


def test_an_ordinary_pass_is_refused() -> None:
    part = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="got no packed row"):
        attend(nn.Module(), part, part, part, None)
