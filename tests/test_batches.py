"""Data order, dealing of rows, schedules: everything a step is made of, as pure functions."""

import random

import pytest

from training.batches import learning_rate, rank_rows, step_pairs, total_steps


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
    lengths = [rng.randint(5, 60) for _ in range(40)]
    numbers = rng.sample(range(40), 17)
    dealt = [rank_rows(numbers, lengths, 64, rank, world) for rank in range(world)]
    assert len({len(rows) for rows in dealt}) == 1  # every rank takes as many passes
    counted = [n for rows in dealt for members, counts in rows if counts for n in members]
    assert sorted(counted) == sorted(numbers)


def test_ranks_get_rows_of_like_cost():
    lengths = [10 * n for n in range(1, 9)]
    costs = [
        sum(lengths[n] for members, counts in rank_rows(range(8), lengths, 80, rank, 2) if counts for n in members)
        for rank in (0, 1)
    ]
    assert abs(costs[0] - costs[1]) <= 80


def test_learning_rate_warms_up_and_ends_low():
    rates = [learning_rate(step, 20, 1.0, 0.1, "cosine") for step in range(20)]
    assert rates[0] == 0.5
    assert rates[1] == rates[2] == 1.0
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.01
    assert learning_rate(11, 20, 1.0, 0.1, "linear") == pytest.approx(0.5)
    assert learning_rate(19, 20, 1.0, 0.1, "constant") == 1.0
    assert learning_rate(0, 20, 1.0, 0.0, "constant") == 1.0
