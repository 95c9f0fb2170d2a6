"""Preemption: a training worker that gets SIGTERM ends after its step, with a checkpoint, instead of at once.

`python -m tasks.machines.preemption SECONDS` on a machine that is about to go (a pod's preStop hook, a spot notice)
asks its training workers to end and waits until they have.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

WORKER = "RayTrainWorker"
_asked, _training = threading.Event(), threading.Event()


def listen() -> None:
    """In a worker's main thread: remember the first SIGTERM of a training; every other one ends the process."""
    before = signal.getsignal(signal.SIGTERM)

    def asked(number: int, frame: FrameType | None) -> None:
        if _training.is_set() and not _asked.is_set():
            _asked.set()
        elif callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, asked)


@contextmanager
def training() -> Iterator[threading.Event]:
    """Around a training; the event is set when this worker was asked to end."""
    _asked.clear()
    _training.set()
    try:
        yield _asked
    finally:
        _training.clear()


def end_workers(seconds: float) -> int:
    """Ask the training workers of this machine to end; how many have not ended in time."""
    found = [process for process in psutil.process_iter(["cmdline"]) if _is_worker(process)]
    for process in found:
        process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(found, timeout=seconds)
    return len(alive)


def _is_worker(process: psutil.Process) -> bool:
    return WORKER in " ".join(process.info["cmdline"] or ())


if __name__ == "__main__":
    sys.exit(min(end_workers(float(sys.argv[1])), 1))
