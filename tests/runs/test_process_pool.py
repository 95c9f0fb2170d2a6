"""Work over processes: in order, a few tasks at a time, and a killed worker is a sentence."""

import os
from collections.abc import Iterator

import pytest

from tasks.errors import UserError
from tasks.system.process_pool import AHEAD, map_in_order


def double(task: int) -> int:
    return 2 * task


def die(task: int) -> int:
    os._exit(9)


def refuse(task: int) -> int:
    raise UserError(f"task {task} cannot be done")


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_tasks_which_are_taken_as_needed(processes):
    taken = []

    def tasks() -> Iterator[int]:
        for number in range(50):
            taken.append(number)
            yield number

    results = map_in_order(double, tasks(), processes)
    assert next(results) == 0
    assert len(taken) <= processes * AHEAD + 1
    assert list(results) == [2 * number for number in range(1, 50)]


@pytest.mark.parametrize(("work", "sentence"), [(die, "was killed.*smaller prepare.num_workers"), (refuse, "task 0")])
def test_what_goes_wrong_in_a_process_is_said_here(work, sentence):
    with pytest.raises(UserError, match=sentence):
        list(map_in_order(work, range(5), 2))
