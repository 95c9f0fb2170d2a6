"""Data order, dealing of rows, schedules: everything a step is made of, as pure functions."""

import random

import numpy as np
import pytest

from training.pairs.batches import learning_rate, pair_costs, rank_rows, step_pairs, total_steps
from training.pairs.pair import Pair


def test_an_epoch_sees_every_pair_once_and_the_next_in_another_order():
    first = [n for step in range(4) for n in step_pairs(step, 14, 4, seed=0)]
    second = [n for step in range(4, 8) for n in step_pairs(step, 14, 4, seed=0)]
    assert sorted(first) == sorted(second) == list(range(14))
    assert first != second
    assert step_pairs(2, 14, 4, seed=0) == first[8:12]  # of the step alone, so that a resume is exact


def test_steps_count_a_short_last_batch_and_stop_at_max_steps():
    assert total_steps(pairs=14, global_batch_size=4, epochs=2, max_steps=None) == 8
    assert total_steps(pairs=14, global_batch_size=4, epochs=2, max_steps=5) == 5


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_a_step_without_loss_or_repetition(world):
    rng = random.Random(1)
    lengths = np.array([rng.randint(5, 60) for _ in range(40)])
    numbers = rng.sample(range(40), 17)
    dealt = [rank_rows(numbers, lengths, lengths, 64, rank, world) for rank in range(world)]
    assert len({len(rows) for rows in dealt}) == 1  # every rank takes as many passes
    counted = [n for rows in dealt for members, is_filler in rows if not is_filler for n in members]
    assert sorted(counted) == sorted(numbers)


def test_no_rank_waits_for_another():
    """In every pass the ranks' rows cost nearly the same, attention included."""
    rng = random.Random(2)
    pairs = [
        Pair(str(n), range(rng.randint(10, 600)), range(rng.randint(5, 300)), range(rng.randint(5, 300)), [], [])
        for n in range(64)
    ]
    lengths, costs = np.array(list(map(len, pairs))), pair_costs(pairs, hidden_size=64)
    dealt = [rank_rows(range(64), lengths, costs, 8192, rank, 4) for rank in range(4)]
    for passes in zip(*dealt, strict=True):
        each = [sum(costs[n] for n in members) for members, _ in passes]
        assert max(each) / min(each) < 1.15


def test_attention_is_part_of_the_cost():
    long = Pair("a", range(500), range(250), range(1, 251), [], [])
    attended = 750 * 751 / 2 + 250 * 500 + 250 * 251 / 2  # by prompt and chosen, by rejected to the prompt and itself
    assert pair_costs([long], hidden_size=64).tolist() == [1000 + attended / 384]


def test_learning_rate_warms_up_and_ends_low():
    rates = [learning_rate(step, 20, 1.0, 0.1, "cosine") for step in range(20)]
    assert rates[0] == 0.5
    assert rates[1] == rates[2] == 1.0
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.01
    assert learning_rate(11, 20, 1.0, 0.1, "linear") == pytest.approx(0.5)
    assert learning_rate(19, 20, 1.0, 0.1, "constant") == 1.0
    assert learning_rate(0, 20, 1.0, 0.0, "constant") == 1.0
