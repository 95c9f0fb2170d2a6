"""Time and memory limits for work on untrusted input."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any


@contextmanager
def bounded(seconds: float | None = None, memory: int | None = None) -> Iterator[None]:
    """TimeoutError after `seconds` (main thread only); MemoryError beyond `memory` additional bytes (Linux only)."""
    on_time = _timer(seconds) if seconds and threading.current_thread() is threading.main_thread() else nullcontext()
    with on_time, _memory(memory) if memory and sys.platform == "linux" else nullcontext():
        yield


@contextmanager
def _timer(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    # Repeats every second: Jinja swallows exceptions while it folds constants.
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _memory(more: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in (soft, hard, now + more) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
