"""A child process that does not outlive us: not when we fail, not when we are cancelled, not after `kill -9`.

All that descends from it carries a mark in its environment, so that it is found in whatever session it is (Ray's
processes have their own) and whoever its parent has become.
"""

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

import psutil

GRACE = 10.0  # seconds between SIGTERM and SIGKILL

MARK = "DPO_FAMILY"

# Reads from a pipe that only we hold open: when we are gone, however that came, it ends the child's process group,
# and then what carries its mark. A process that it started itself (grep, sleep) carries none.
GUARD = (
    'cat >/dev/null; marked() { grep -lsaz "^$1$" /proc/[0-9]*/environ | cut -d / -f 3; }; kill -s TERM -- "-$0"; '
    f'for second in $(seq {GRACE:.0f}); do [ -n "$(marked "$1")" ] || kill -s 0 -- "-$0" || exit; sleep 1; done; '
    'kill -s KILL -- "-$0"; for pid in $(marked "$1"); do kill -s KILL "$pid"; done'
)


_marks: dict[int, str] = {}  # of the children that are at work, by their pid
_running: set[int] = set()  # those that `run` waits for


def run(command: Sequence[str], cwd: Path, env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
    """Run `command`, hand over each line of its output as it comes, and return its exit code."""
    with started(command, cwd, env, subprocess.PIPE) as process:
        # A grandchild that stays behind would keep the pipe open and us reading for ever.
        threading.Thread(target=_end_what_stays_behind, args=(process,), daemon=True).start()
        assert process.stdout is not None
        _running.add(process.pid)
        try:
            for line in process.stdout:
                on_line(line.rstrip())
            return process.wait()
        finally:
            _running.discard(process.pid)


def end_running() -> None:
    """End the children that `run` waits for in other threads."""
    for pid in list(_running):
        end(pid)


@contextmanager
def started(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], output: int | IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """A child in a process group of its own, so that Ctrl-C in the terminal reaches us alone."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**env, MARK: mark, "SPT_NOENV": "1"},  # Ray's workers write their titles over the mark otherwise
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD, str(process.pid), f"{MARK}={mark}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != MARK},
    )
    _marks[process.pid] = mark
    try:
        yield process
    finally:
        end(process.pid)
        del _marks[process.pid]
        process.wait()
        guard.kill()
        guard.wait()


def _end_what_stays_behind(process: subprocess.Popen[str]) -> None:
    process.wait()
    end(process.pid)


@cache  # once for a process
def end_with_parent() -> None:
    """End as if by `kill` when the process that started us is gone: a worker that is killed leaves its runs running."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def end(pid: int) -> None:
    """End the process group of `pid` and all that descends from it, politely, then not."""
    family = _family(pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(pid, sign)
        if sign == signal.SIGKILL:  # descendants in groups of their own were only waited for
            for process in filter(_alive, family):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        until = time.monotonic() + GRACE
        while any(map(_alive, family)) and time.monotonic() < until:
            time.sleep(0.1)


def _family(pid: int) -> list[psutil.Process]:
    mark = _marks.get(pid)
    members = [one for one in psutil.process_iter() if _group(one.pid) == pid or (mark and _mark(one) == mark)]
    with suppress(psutil.NoSuchProcess):
        members += psutil.Process(pid).children(recursive=True)
    return [one for one in members if not _guards(one)]


def _guards(process: psutil.Process) -> bool:
    """Whether it is the guard of a child further down: that ends by itself, when its work is done."""
    try:
        return GUARD in process.cmdline()
    except psutil.Error:
        return False


def _mark(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):  # not ours to look at, or gone
        return None


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
