"""Packed, prefix-shared rows: what they look like, how they are filled, and what work they cost."""

import random

import pytest
import torch

from training.pairs.packing import build_row
from training.pairs.pair import Pair, pack
from training.pairs.pair_columns import columns_of
from training.scoring.attention import row_mask


def test_a_row_shares_the_prompt_and_restarts_positions():
    first = Pair("a", [1, 2], [3, 4], [5], [1, 1], [1], label=0.7)
    second = Pair("b", [6], [7], [8, 9], [1], [0, 1], weight=2.0)
    row = build_row([first, second], [0, 1])
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1, 1, 2]
    assert row.target_ids.tolist() == [3, 4, 5, 7, 8, 9]
    assert row.predict_positions.tolist() == [1, 2, 1, 5, 5, 7]  # the prompt's last token predicts both first tokens
    assert row.target_index.tolist() == [0, 1, 2, 3, 4, 5]
    assert row.response_index.tolist() == [0, 0, 1, 2, 3, 3]
    assert row.loss_mask.tolist() == [1, 1, 1, 1, 0, 1]
    assert row.counted_before.tolist() == [0, 1, 0, 0, 0, 0]  # counted tokens before it
    assert row.weight.tolist() == [1.0, 2.0]
    assert row.has_soft_labels
    assert row_mask(row).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],  # rejected: the prompt, not the chosen response
        [0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 0, 1, 1],
    ]


def test_what_both_responses_begin_with_is_computed_once():
    """Prompt 1 2, then 3 4 in both; chosen goes on with 5, rejected with 6 7."""
    pair = Pair("a", [1, 2], [3, 4, 5], [3, 4, 6, 7], [1, 1, 1], [1, 1, 1, 1])
    row = build_row([pair], [0])
    assert (pair.shared_prefix, len(pair)) == (2, 7)
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 5]
    assert row.target_ids.tolist() == [3, 4, 5, 6, 7]
    assert row.predict_positions.tolist() == [1, 2, 3, 3, 5]
    assert row.target_ids[row.target_index].tolist() == [*pair.chosen_ids, *pair.rejected_ids]
    assert row_mask(row).int().tolist()[4:] == [
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 1, 0],  # rejected: all but the chosen response's own
        [1, 1, 1, 1, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [([3], [3], 0), ([3, 4], [3, 4], 1), ([3, 4], [3, 4, 5], 1), ([3, 4, 5], [3], 0), ([3, 4], [5, 4], 0)],
)
def test_each_response_keeps_its_last_token(chosen, rejected, shared):
    assert Pair("a", [1], chosen, rejected, [], []).shared_prefix == shared


def test_the_sequences_of_flash_attention_are_the_mask():
    """Six sequences of queries, each aligned with the end of its keys, see what the mask shows."""
    shared = Pair("c", [1], [2, 3, 4], [2, 3, 5], [1] * 3, [1] * 3)
    pairs = [Pair("a", [1, 2], [3, 4], [5], [1, 1], [1]), Pair("b", [6], [7], [8, 9], [1], [0, 1]), shared]
    row = build_row(pairs, [0, 1, 2])
    seen = torch.zeros(14, 14, dtype=torch.bool)
    queries, keys = row.cu_seqlens_q.tolist(), row.cu_seqlens_k.tolist()
    assert queries == [0, 4, 5, 7, 9, 13, 14]
    assert keys == [0, 4, 7, 9, 12, 16, 20]
    for sequence in range(6):
        own_keys = row.key_index[keys[sequence] : keys[sequence + 1]]
        own_queries = range(queries[sequence], queries[sequence + 1])
        for behind, query in enumerate(reversed(own_queries)):
            seen[query, own_keys[: len(own_keys) - behind]] = True
    assert torch.equal(seen, row_mask(row))
    assert row.max_length == 4


def test_attended_counts_the_mask():
    pair = Pair("a", range(5), range(3), range(4), [1] * 3, [1] * 4)
    assert columns_of([pair]).attended_tokens.item() == row_mask(build_row([pair], [0])).sum()


def test_sums_are_by_response():
    row = build_row([Pair("b", [6], [7], [8, 9], [1], [0, 1])], [0])
    chosen, rejected = row.sums(torch.tensor([1.0, 10.0, 100.0]) * row.loss_mask)
    assert (chosen.tolist(), rejected.tolist()) == ([1.0], [100.0])


def test_packing_puts_every_item_in_one_row_within_the_budget():
    lengths = [random.Random(7).randint(1, 40) for _ in range(200)]
    rows = pack(lengths, lengths, 64)
    assert sorted(item for row in rows for item in row) == list(range(200))
    assert all(sum(lengths[item] for item in row) <= 64 for row in rows)
    assert sum(lengths) / (64 * len(rows)) > 0.9  # little is left empty


def test_rows_are_even_and_as_many_as_ranks_can_share():
    rng = random.Random(3)
    lengths = [rng.randint(50, 900) for _ in range(64)]
    for world in (1, 2, 4, 8):
        rows = pack(lengths, lengths, 8192, multiple=world)
        sizes = [sum(lengths[item] for item in row) for row in rows]
        assert len(rows) % world == 0
        assert max(sizes) <= min(8192, 1.05 * sum(sizes) / len(sizes))


def test_an_item_above_the_budget_gets_a_row_of_its_own():
    rows = pack([5, 100, 5], [5, 100, 5], 10)
    assert sorted(map(sorted, rows)) == [[0, 2], [1]]


def test_fewer_items_than_ranks_leave_rows_empty():
    assert sorted(map(len, pack([3, 4], [3, 4], 10, multiple=4))) == [0, 0, 1, 1]
