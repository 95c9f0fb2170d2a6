"""Which process it was: a process id is used again, so its start time and the machine's boot id stand beside it."""

import os
import socket
from pathlib import Path
from typing import Any

import psutil

BOOT = Path("/proc/sys/kernel/random/boot_id")
STARTED = 19  # the field of /proc/<pid>/stat behind the name in parentheses: clock ticks after boot


def this_process() -> dict[str, Any]:
    """What is noted of a process: `is_alive` knows it again."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "began": began(pid), "boot": boot()}


def is_alive(noted: dict[str, Any]) -> bool:
    """Whether the noted process still works here. Of one on another host nobody knows: it counts as alive."""
    pid = noted.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    if noted.get("host", socket.gethostname()) != socket.gethostname():
        return True
    if noted.get("boot", boot()) != boot():
        return False
    since = began(pid)
    return since is not None and noted.get("began", since) == since


def began(pid: int) -> int | None:
    """When a process began, in a measure that no change of the clock moves; None where there is none."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if BOOT.exists():
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            return None if fields[0] in "ZX" else int(fields[STARTED])
        return round(psutil.Process(pid).create_time())
    except (OSError, IndexError, psutil.Error):
        return None


def boot() -> str:
    """This start of this machine, and on Linux the process-id namespace: containers of one machine count apart."""
    if BOOT.exists():
        return f"{BOOT.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    return str(round(psutil.boot_time()))
