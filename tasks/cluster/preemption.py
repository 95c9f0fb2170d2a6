"""Preemption: a training worker that gets SIGTERM ends after its step, with a checkpoint, instead of at once.

`python -m tasks.cluster.preemption SECONDS` on a machine that is about to stop (a pod's preStop hook, a spot notice)
sends SIGTERM to its training workers and waits until they have ended.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

WORKER_TITLE = "RayTrainWorker"  # in the command line of a worker process
_preempted, _training = threading.Event(), threading.Event()


def handle_sigterm() -> None:
    """In a worker's main thread: the first SIGTERM of a training is a notice; any other one ends the process."""
    default = signal.getsignal(signal.SIGTERM)

    def handler(number: int, frame: FrameType | None) -> None:
        if _training.is_set() and not _preempted.is_set():
            _preempted.set()
        elif callable(default):
            default(number, frame)

    signal.signal(signal.SIGTERM, handler)


@contextmanager
def preemptible() -> Iterator[threading.Event]:
    """Around a training; SIGTERM sets the event."""
    _preempted.clear()
    _training.set()
    try:
        yield _preempted
    finally:
        _training.clear()


def preempt_workers(seconds: float) -> int:
    """Send SIGTERM to the training workers of this machine; the number of those still alive after `seconds`."""
    workers = [p for p in psutil.process_iter(["cmdline"]) if WORKER_TITLE in " ".join(p.info["cmdline"] or ())]
    for process in workers:
        process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(workers, timeout=seconds)
    return len(alive)


if __name__ == "__main__":
    sys.exit(min(preempt_workers(float(sys.argv[1])), 1))
