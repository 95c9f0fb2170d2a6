"""A parallel map over processes: results in the order of the tasks, few tasks in memory at a time.

`ProcessPoolExecutor.map` reads all tasks first (`buffersize` needs Python 3.14), and sends the function with each of
them. Here a killed worker is a UserError, and workers end with their parent.
"""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from tasks.errors import UserError
from tasks.system.processes import die_with_parent

T = TypeVar("T")
AHEAD = 3  # tasks in flight per process
_work: Callable[[Any], Any] | None = None


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(work: Callable[[Any], T], tasks: Iterable[Any], processes: int) -> Iterator[T]:
    """work(task) for each task, in order; with `processes` 1 in this process."""
    if processes == 1:
        yield from map(work, tasks)
        return
    # A forked worker shares what is loaded; fork is safe on Linux alone.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, context, _initialize, (work,))
    try:
        yield from _results(pool, iter(tasks), processes * AHEAD)
    except BrokenProcessPool:
        raise UserError(
            "A worker process of prepare was killed, most likely because memory ran out. "
            "Set a smaller prepare.num_workers in infra/cluster.yaml, and run again."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _results(pool: ProcessPoolExecutor, tasks: Iterator[Any], ahead: int) -> Iterator[Any]:
    pending: deque[Future[Any]] = deque(pool.submit(_call, task) for task in islice(tasks, ahead))
    while pending:
        yield pending.popleft().result()
        pending.extend(pool.submit(_call, task) for task in islice(tasks, 1))


def _initialize(work: Callable[[Any], Any]) -> None:
    global _work
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the stage, which ends its workers
    _work = work


def _call(task: Any) -> Any:
    assert _work is not None
    return _work(task)
