"""One run per workspace: a lock that names its holder and that the kernel releases when the holder dies.

`with workspace_lock(root):` around whatever writes in a workspace. The processes that the holder starts inherit its
token in DPO_LOCK and pass through; everyone else gets a sentence that says who is at work.
"""

import fcntl
import json
import os
import shlex
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from tasks.errors import UserError

TOKEN = "DPO_LOCK"


@contextmanager
def workspace_lock(root: Path) -> Iterator[None]:
    path = root / ".scratch" / "run.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not _take(file):
            _pass_or_refuse(file, root)
            yield
            return
        before, token = os.environ.get(TOKEN), uuid.uuid4().hex
        _write(file, token)
        os.environ[TOKEN] = token
        try:
            yield
        finally:
            file.truncate(0)  # closing the file releases the lock
            if before is None:
                del os.environ[TOKEN]
            else:
                os.environ[TOKEN] = before


def _take(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(file: TextIO, token: str) -> None:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": _command(), "token": token}
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


def _read(file: TextIO) -> dict[str, str] | None:
    for _ in range(20):  # the holder writes its name a moment after it took the lock
        file.seek(0)
        try:
            return json.loads(file.read())
        except json.JSONDecodeError:
            time.sleep(0.05)
    return None
