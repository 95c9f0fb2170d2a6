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
    return {"pid": pid, "host": socket.gethostname(), "began": _began(pid), "boot": _boot()}


def is_alive(noted: dict[str, Any]) -> bool:
    """Whether the noted process still works here. Of one on another host nobody knows: it counts as alive."""
    pid = noted.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    if noted.get("host", socket.gethostname()) != socket.gethostname():
        return True
    if noted.get("boot", _boot()) != _boot():
        return False
    began = _began(pid)
    return began is not None and noted.get("began", began) == began


def _began(pid: int) -> float | None:
    """When a process began, in a measure that no change of the clock moves; None where there is none."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if BOOT.exists():
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            return None if fields[0] in "ZX" else float(fields[STARTED])
        return round(psutil.Process(pid).create_time())
    except (OSError, IndexError, psutil.Error):
        return None


def _boot() -> str:
    return BOOT.read_text().strip() if BOOT.exists() else str(round(psutil.boot_time()))
