"""Run a function in a forked child with limits of time and memory: what it reads may make a library loop or abort."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tasks.system.processes import die_with_parent

PAUSE = 0.02  # seconds between two looks at the child


def call(work: Callable[..., Any], *args: Any, seconds: float, memory: int) -> Any:
    """The result of work(*args), which must be JSON. ValueError: its own, or that it exceeded a limit, or died.

    `memory` counts the bytes that the child adds to what it has from its parent (Linux).
    """
    # A forked child shares the libraries that this process has imported; fork is safe on Linux alone.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(sender, work, args))
    child.start()
    sender.close()
    try:
        _wait(receiver, child.pid, seconds, memory)
        outcome = json.loads(receiver.recv_bytes())
    except EOFError:
        child.join()
        raise ValueError(f"reading it ended the process that tried (exit status {child.exitcode})") from None
    finally:
        child.kill()
        child.join()
        receiver.close()
    if "refused" in outcome:
        raise ValueError(outcome["refused"])
    return outcome["result"]


def _wait(receiver: Connection, pid: int | None, seconds: float, memory: int) -> None:
    before, until = _anonymous_bytes(pid), time.monotonic() + seconds
    while not receiver.poll(PAUSE):
        if time.monotonic() > until:
            raise ValueError(f"reading it takes more than {seconds:g} s")
        if _anonymous_bytes(pid) - before > memory:
            raise ValueError(f"reading it takes more than {memory / 2**30:g} GiB of memory")


def _anonymous_bytes(pid: int | None) -> int:
    """Resident memory without mapped files: a child that reads headers maps all weights."""
    if sys.platform != "linux":
        return 0
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except OSError:  # it has just ended
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _report(sender: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    try:
        outcome = {"result": work(*args)}
    except ValueError as error:
        outcome = {"refused": str(error)}
    except BaseException as error:  # what a library makes of damaged input; a panic in Rust is no Exception
        outcome = {"refused": f"reading it failed ({type(error).__name__}: {str(error)[:200]})"}
    sender.send_bytes(json.dumps(outcome).encode())
