"""What a killed DVC or git leaves in a workspace: recognised without asking either, and cleared.

A run clears it by itself before it works; `make doctor` shows it, and `make doctor FIX=1` clears it for work by hand.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from tasks.files import write_text

SETTLED = 5.0  # seconds after which a lock of git's that no process holds is nobody's
CLOCK = 1.0  # seconds by which a process's start and a file's time may be off


def mend(workspace: Path) -> list[str]:
    """Clear what stands in the way in a workspace whose lock we hold; a sentence for each thing."""
    said = []
    if gone := gone_from_rwlock(workspace):
        clear_rwlock(workspace)
        said.append(f"cleared DVC's lock of processes that are gone ({', '.join(map(str, sorted(gone)))})")
    if has_damaged_lock(workspace):
        kept = set_lock_aside(workspace)
        said.append(f"dvc.lock was damaged and is now {kept}; DVC takes what it made before from its run cache")
    return said


def rwlock(workspace: Path) -> Path:
    return workspace / ".dvc" / "tmp" / "rwlock"


def gone_from_rwlock(workspace: Path) -> set[int]:
    """Process ids in DVC's rwlock that no longer are the process that took it; 0 where the file is damaged.

    DVC itself asks only whether the id is in use, and waits for ever for another process that got it.
    """
    path = rwlock(workspace)
    try:
        return {pid for pid in _pids(json.loads(path.read_text())) if not _held_by(pid, path.stat().st_mtime)}
    except FileNotFoundError:
        return set()
    except (ValueError, AttributeError, TypeError, KeyError):
        return {0}


def holders(workspace: Path) -> list[int]:
    """Process ids of living processes that hold files through DVC's rwlock."""
    path = rwlock(workspace)
    if not path.exists() or 0 in (gone := gone_from_rwlock(workspace)):
        return []
    return sorted(set(_pids(json.loads(path.read_text()))) - gone)


def clear_rwlock(workspace: Path) -> None:
    path, gone = rwlock(workspace), gone_from_rwlock(workspace)
    if 0 in gone:
        path.unlink()
        return
    content = json.loads(path.read_text())
    write = {name: one for name, one in content.get("write", {}).items() if int(one["pid"]) not in gone}
    read = {
        name: [one for one in some if int(one["pid"]) not in gone] for name, some in content.get("read", {}).items()
    }
    kept = {"write": write, "read": {name: some for name, some in read.items() if some}}
    write_text(path, json.dumps({kind: part for kind, part in kept.items() if part}))


def _pids(content: dict[str, Any]) -> Iterator[int]:
    for one in content.get("write", {}).values():
        yield int(one["pid"])
    for several in content.get("read", {}).values():
        yield from (int(one["pid"]) for one in several)


def _held_by(pid: int, since: float) -> bool:
    """Whether the process with this id was there already when the lock was written."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since + CLOCK
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def has_damaged_lock(workspace: Path) -> bool:
    """Whether dvc.lock is half a file: DVC writes it in place."""
    path = workspace / "dvc.lock"
    if not path.exists():
        return False
    try:
        stages = yaml.safe_load(path.read_text())["stages"]
        parts = [part for stage in stages.values() for kind in ("deps", "outs") for part in stage.get(kind, [])]
        return not all("cmd" in stage for stage in stages.values()) or not all("path" in part for part in parts)
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError):
        return True


def set_lock_aside(workspace: Path) -> Path:
    kept = workspace / ".scratch" / "dvc.lock.damaged"
    kept.parent.mkdir(parents=True, exist_ok=True)
    os.replace(workspace / "dvc.lock", kept)
    return kept


def git_locks(folder: Path) -> list[Path]:
    """Lock files in git's folder that were there for a while, while no git works in the repository."""
    patterns = ("*.lock", "worktrees/*/*.lock", "refs/**/*.lock", "worktrees/*/refs/**/*.lock")
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return [path for path in found if age(path) > SETTLED] if found and not _git_works(folder.parent) else []


def clear_git_lock(path: Path, root: Path) -> bool:
    """Remove a lock that a killed git left, once it is clear that nobody holds it; whether it was removed."""
    time.sleep(max(0.0, SETTLED - age(path)))
    if _git_works(root) or not path.name.endswith(".lock") or (path.exists() and age(path) < SETTLED):
        return False
    path.unlink(missing_ok=True)
    return True


def _git_works(root: Path) -> bool:
    """Whether a git of this machine works in the repository or in one of its worktrees."""
    for process in psutil.process_iter(["name"]):
        try:
            name = process.info["name"] or ""
            if name.startswith("git") and Path(process.cwd()).is_relative_to(root.resolve()):
                return True
        except psutil.NoSuchProcess:
            continue
        except (psutil.AccessDenied, OSError):  # somebody else's: it may be here
            return True
    return False


def age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
