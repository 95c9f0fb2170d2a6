"""Identifies processes, and runs children that end with us: after a failure, a cancellation and `kill -9`, too.

Process ids are reused, so a record of a process also has its start time and the machine's boot id. All descendants of a
child carry a mark in their environment: we find them in any session (Ray's processes have their own), under any parent.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

BOOT = Path("/proc/sys/kernel/random/boot_id")
START_FIELD = 19  # of /proc/<pid>/stat, behind the name in parentheses: clock ticks after boot
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
FAMILY_VARIABLE = "DPO_FAMILY"
# Reads, without a process for it, from a pipe that only we hold open. When we are gone, for whatever reason, it ends
# the child's process group, then every process with its mark. Its own children (grep, sleep) carry none.
GUARD = (
    'read -r _; marked() { grep -lsaz "^$1$" /proc/[0-9]*/environ | cut -d / -f 3; }; kill -s TERM -- "-$0"; '
    f'for second in $(seq {GRACE:.0f}); do [ -n "$(marked "$1")" ] || kill -s 0 -- "-$0" || exit; sleep 1; done; '
    'kill -s KILL -- "-$0"; for pid in $(marked "$1"); do kill -s KILL "$pid"; done'
)
_marks: dict[int, str] = {}  # of running children, by pid
_awaited: set[int] = set()  # children that `run` waits for


def this_process() -> dict[str, Any]:
    return process_record(os.getpid())


def process_record(pid: int) -> dict[str, Any]:
    """A record of a running process that `is_alive` recognises."""
    return {"pid": pid, "host": socket.gethostname(), "began": start_time(pid), "boot": boot_id()}


def is_alive(record: dict[str, Any]) -> bool:
    """Whether the recorded process still runs. One on another host counts as alive: nothing here can tell."""
    pid = record.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    if record.get("host", socket.gethostname()) != socket.gethostname():
        return True
    if record.get("boot", boot_id()) != boot_id():
        return False
    since = start_time(pid)
    return since is not None and record.get("began", since) == since


def start_time(pid: int) -> int | None:
    """When a process started, in a unit that no change of the clock moves; None where there is no such process."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if BOOT.exists():
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            return None if fields[0] in "ZX" else int(fields[START_FIELD])
        return round(psutil.Process(pid).create_time())
    except (OSError, IndexError, psutil.Error):
        return None


def boot_id() -> str:
    """This boot of this machine; on Linux also the process-id namespace, since containers number their own."""
    if BOOT.exists():
        return f"{BOOT.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    return str(round(psutil.boot_time()))


def run(command: Sequence[str], cwd: Path, env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
    """Run `command`, pass each line of its output to `on_line` as it comes, and return its exit code."""
    with spawn(command, cwd, env, subprocess.PIPE) as process:
        # A surviving grandchild would keep the pipe open, and us reading, for ever.
        threading.Thread(target=_terminate_after, args=(process,), daemon=True).start()
        assert process.stdout is not None
        _awaited.add(process.pid)
        try:
            for line in process.stdout:
                on_line(line.rstrip())
            return process.wait()
        finally:
            _awaited.discard(process.pid)


def terminate_awaited() -> None:
    """End the children that `run` waits for in other threads; their grace periods run at the same time."""
    pids = list(_awaited)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
    for pid in pids:
        terminate(pid)


@contextmanager
def spawn(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], output: int | IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """Start a child that ends with the block. It has its own process group: Ctrl-C in the terminal reaches us alone."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={
            **env,
            FAMILY_VARIABLE: mark,
            "SPT_NOENV": "1",
        },  # or Ray titles overwrite it
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD, str(process.pid), f"{FAMILY_VARIABLE}={mark}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != FAMILY_VARIABLE},
    )
    _marks[process.pid] = mark
    try:
        yield process
    finally:
        terminate(process.pid)
        del _marks[process.pid]
        process.wait()
        guard.kill()
        guard.wait()


def _terminate_after(process: subprocess.Popen[str]) -> None:
    process.wait()
    terminate(process.pid)


def die_with_parent() -> None:
    """Let the kernel end us with our parent (Linux). DVC, when it is killed, leaves a stage's command running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


@cache  # once per process
def exit_with_parent() -> None:
    """Send ourselves SIGTERM when our parent is gone: a killed Prefect worker leaves its flow runs running."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def terminate(pid: int) -> None:
    """End the process group of `pid` and all its descendants: SIGTERM, then SIGKILL after the grace period."""
    family = _family(pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(pid, sign)
        if sign == signal.SIGKILL:  # descendants in other groups got no SIGTERM; we only waited for them
            for process in filter(is_running, family):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        until = time.monotonic() + GRACE
        while any(map(is_running, family)) and time.monotonic() < until:
            time.sleep(0.1)


def _family(pid: int) -> list[psutil.Process]:
    """The process group of `pid`, all processes with its mark, and its descendants."""
    mark = _marks.get(pid)
    members = [process for process in psutil.process_iter() if _is_member(process, pid, mark)]
    with suppress(psutil.NoSuchProcess):
        members += psutil.Process(pid).children(recursive=True)
    return [process for process in members if not _is_guard(process)]


def _is_member(process: psutil.Process, group: int, mark: str | None) -> bool:
    try:
        return os.getpgid(process.pid) == group or (mark is not None and process.environ().get(FAMILY_VARIABLE) == mark)
    except (psutil.Error, OSError):  # another user's, or gone
        return False


def _is_guard(process: psutil.Process) -> bool:
    """The guard of a child further down ends by itself, when its work is done."""
    try:
        return GUARD in process.cmdline()
    except psutil.Error:
        return False


def is_running(process: psutil.Process) -> bool:
    """A zombie does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
