"""The ways to attend over a row say the same as its mask."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from training.pairs.packing import PackedRow, build_row
from training.pairs.pair import Pair
from training.scoring import attention
from training.scoring.attention import attend, attention_inputs, blocks, kernel_calls, row_mask

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


LONG_ROWS = {
    "one pair": ([(40, 3, 9)], [True, False]),
    "short ones between": (
        [(5, 3, 4), (40, 3, 2), (1, 1, 1), (2, 5, 1), (30, 9, 9)],
        [False, True, False, True, False],
    ),
    "short ones alone": ([(5, 3, 4), (2, 5, 1)], [False]),
}


@pytest.mark.parametrize(("lengths", "expected"), LONG_ROWS.values(), ids=LONG_ROWS)
def test_long_sequences_alone_and_the_others_together_are_the_mask(
    lengths: list[tuple[int, int, int]], expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The split of a row into calls of two kernels, which have a GPU's in tests/train/test_gpu.py."""
    monkeypatch.setattr(attention, "LONG", 25)
    row = row_of(lengths)
    parts = kernel_calls(row)
    assert [part.cu_seqlens is None for part in parts] == expected

    def long(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(0, 1)

    def flash(
        query: Tensor, key: Tensor, value: Tensor, index: Tensor, cu_seqlens: Any, longest: int, *_: Any
    ) -> Tensor:
        queries, keys = (cu.diff().tolist() for cu in cu_seqlens)
        assert longest == max(keys)
        return attention._by_sequence(query[None], key[None], value[None], index, (queries, keys), None, None, None)[0]

    monkeypatch.setattr(attention, "_long", long)
    monkeypatch.setattr(attention, "_flash", flash)
    shape = (1, 2, len(row.token_pair), 8)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    query = torch.randn(1, 4, *shape[2:], generator=generator, dtype=torch.float64)
    out, _ = attend(nn.Module(), query, key, value, None, row_key_index=row.key_index, row_calls=parts)
    torch.testing.assert_close(out, by_mask(query, key, value, row, None, None))


def test_pairs_that_are_alike_become_blocks_and_others_one() -> None:
    assert "row_blocks" in blocks(row_of(ALIKE))
    assert "row_blocks" not in blocks(row_of(UNLIKE))


def test_an_ordinary_pass_is_refused() -> None:
    part = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="got no packed row"):
        attend(nn.Module(), part, part, part, None)
