"""Locks that the kernel releases when their holder dies, however it dies (flock).

- `file_lock`: a plain lock on a file.
- `exclusive`: waits for the lock and reports which process holds it.
- `workspace_lock`: one run per workspace. The holder's children inherit its token in DPO_LOCK and pass through; every
  other process gets an error that names the holder.
- `lock_cached_folder`: `exclusive` on a folder that several runs share.
"""

import fcntl
import json
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from tasks.errors import UserError
from tasks.system.processes import this_process

TOKEN = "DPO_LOCK"


@contextmanager
def file_lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Yields whether this process acquired the lock; without `wait` it may not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def exclusive(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock; while another process holds it, call `on_wait` with that process and wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not _acquire(file):
            holder = _read(file)
            on_wait(f"process {holder['pid']} on {holder['host']}" if holder else "another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        _write(file, "")
        try:
            yield
        finally:
            file.truncate(0)


def lock_cached_folder(folder: Path, run: Path, stage: str) -> AbstractContextManager[None]:
    """Around work in a folder that is named by a content hash, which another run may share."""
    record_cached_folder(folder, run, stage)
    wait = "computes the same result; waiting for it, then continuing from there"
    return exclusive(folder.with_suffix(".lock"), lambda holder: print(f"{stage}: {holder} {wait}", flush=True))


def record_cached_folder(folder: Path, run: Path, stage: str) -> None:
    """Note in the run's folder that the run uses `folder`: `dpo gc` keeps what the runs it keeps have used."""
    with (run / "addresses").open("a") as notes:
        notes.write(f"{stage}/{folder.name}\n")


@contextmanager
def workspace_lock(root: Path) -> Iterator[None]:
    """The lock of a process that works in one workspace; its child processes pass through."""
    before = os.environ.get(TOKEN, "")
    with hold_workspace(root) as token:
        os.environ[TOKEN] = token or before
        try:
            yield
        finally:
            os.environ[TOKEN] = before


@contextmanager
def hold_workspace(root: Path) -> Iterator[str | None]:
    """For a process with several workspaces: yields the token for child processes, None where it was inherited."""
    path = _workspace_file(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not _acquire(file):
            _check_token(file, root)
            yield None
            return
        token = uuid.uuid4().hex
        _write(file, token)
        try:
            yield token
        finally:
            file.truncate(0)  # closing the file releases the lock


def workspace_holder(root: Path) -> dict[str, Any] | None:
    """The process that works in a workspace now, if there is one."""
    path = _workspace_file(root)
    if not path.exists():
        return None
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(file)
    return None


def _workspace_file(root: Path) -> Path:
    return root / ".scratch" / "run.lock"


def _acquire(file: TextIO) -> bool:
    for pause in (0.1, 0.1, 0.0):  # `workspace_holder` of another process takes the lock for a moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(pause)
    return False


def _write(file: TextIO, token: str) -> None:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
    file.truncate(0)
    file.write(json.dumps({**this_process(), "since": since, "command": command, "token": token}) + "\n")
    file.flush()


def _check_token(file: TextIO, root: Path) -> None:
    """Pass a child of the holder; refuse any other process."""
    holder = _read(file)
    if holder and holder["token"] == os.environ.get(TOKEN):
        return
    process, advice = "A process that has just started", "Try again in a moment."
    if holder:
        process = f"Process {holder['pid']} on {holder['host']} (`{holder['command']}`, since {holder['since']})"
        advice = f"Wait until it ends, or stop it with `kill {holder['pid']}` on {holder['host']}."
    raise UserError(f"{process} is using {root.resolve()}, and two runs there would overwrite each other. {advice}")


def _read(file: TextIO) -> dict[str, Any] | None:
    for _ in range(20):  # the holder writes its name a moment after it acquired the lock
        file.seek(0)
        try:
            return json.loads(file.read())
        except json.JSONDecodeError:
            time.sleep(0.05)
    return None
