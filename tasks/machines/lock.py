"""One run per workspace: a lock that names its holder and that the kernel releases when the holder dies.

`with workspace_lock(root):` around whatever writes in a workspace. The processes that the holder starts inherit its
token in DPO_LOCK and pass through; everyone else gets a sentence that says who is at work. `alone` is for what two
workspaces share: who comes second waits.
"""

import fcntl
import json
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from tasks.errors import UserError
from tasks.machines.process import this_process

TOKEN = "DPO_LOCK"


@contextmanager
def workspace_lock(root: Path) -> Iterator[None]:
    """The lock of a process that works in one workspace: what it starts passes through."""
    before = os.environ.get(TOKEN)
    with held(root) as token:
        if token is None:
            yield
            return
        os.environ[TOKEN] = token
        try:
            yield
        finally:
            if before is None:
                del os.environ[TOKEN]
            else:
                os.environ[TOKEN] = before


@contextmanager
def held(root: Path) -> Iterator[str | None]:
    """The lock of one of several workspaces of a process: the token to hand on, None where it was inherited."""
    with _lock_file(root).open("a+") as file:
        if not _take(file):
            _pass_or_refuse(file, root)
            yield None
            return
        token = uuid.uuid4().hex
        _write(file, token)
        try:
            yield token
        finally:
            file.truncate(0)  # closing the file releases the lock


def holder(root: Path) -> dict[str, Any] | None:
    """Who works in a workspace now, if anybody does."""
    path = root / ".scratch" / "run.lock"
    if not path.exists():
        return None
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(file)
    return None


@contextmanager
def alone(path: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """One at a time; who must wait tells so through `waiting`, naming who is at work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not _take(file):
            found = _read(file)
            waiting(f"process {found['pid']} on {found['host']}" if found else "another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        _write(file, "")
        try:
            yield
        finally:
            file.truncate(0)


@contextmanager
def at_address(folder: Path, run: Path, stage: str) -> Iterator[None]:
    """Around work in a folder that is named by what determines it, and that another run may therefore share."""
    note_address(folder, run, stage)

    def say(who: str) -> None:
        print(f"{stage}: {who} works on the same; waiting until it is done, to go on from there", flush=True)

    with alone(folder.with_suffix(".lock"), say):
        yield


def note_address(folder: Path, run: Path, stage: str) -> None:
    """In the run's own folder: `make gc` keeps what runs that are kept have used."""
    with (run / "addresses").open("a") as notes:
        notes.write(f"{stage}/{folder.name}\n")


def _lock_file(root: Path) -> Path:
    path = root / ".scratch" / "run.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _take(file: TextIO) -> bool:
    for patience in (0.1, 0.1, 0.0):  # somebody may be looking, for a moment, whether it is held
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(patience)
    return False


def _write(file: TextIO, token: str) -> None:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {**this_process(), "since": since, "command": _command(), "token": token}
    file.truncate(0)
    file.write(json.dumps(holder) + "\n")
    file.flush()


def _command() -> str:
    return shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])


def _pass_or_refuse(file: TextIO, root: Path) -> None:
    holder = _read(file)
    if holder and holder["token"] == os.environ.get(TOKEN):
        return
    who = "A process that has just started"
    what = "Try again in a moment."
    if holder:
        who = f"Process {holder['pid']} on {holder['host']} (`{holder['command']}`, since {holder['since']})"
        what = f"Wait until it ends, or stop it with `kill {holder['pid']}` on {holder['host']}."
    raise UserError(f"{who} is at work in {root.resolve()}, and two runs would overwrite each other. {what}")


def _read(file: TextIO) -> dict[str, Any] | None:
    for _ in range(20):  # the holder writes its name a moment after it took the lock
        file.seek(0)
        try:
            return json.loads(file.read())
        except json.JSONDecodeError:
            time.sleep(0.05)
    return None
