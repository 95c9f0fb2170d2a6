"""Work over processes: results in the order of the tasks, and only a few tasks in memory for each process."""

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
from tasks.stage import die_with_parent

T = TypeVar("T")
AHEAD = 3  # tasks in flight for each process
_work: Callable[[Any], Any] | None = None


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[Any], T], tasks: Iterable[Any], processes: int) -> Iterator[T]:
    """work(task) for each task, in order; one process is this one."""
    if processes == 1:
        yield from map(work, tasks)
        return
    # A fork shares what is loaded; elsewhere than on Linux it is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (work,))
    try:
        yield from _through(pool, iter(tasks), processes * AHEAD)
    except BrokenProcessPool:
        raise UserError(
            "A worker process of prepare was killed, most likely for want of memory. "
            "Give infra/cluster.yaml a smaller prepare.num_workers, and run again."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _through(pool: ProcessPoolExecutor, tasks: Iterator[Any], ahead: int) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque(pool.submit(_do, task) for task in islice(tasks, ahead))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(pool.submit(_do, task) for task in islice(tasks, 1))


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the stage, which ends its workers
    _work = work


def _do(task: Any) -> Any:
    assert _work is not None
    return _work(task)
