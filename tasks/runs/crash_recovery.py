"""Repair what a killed DVC or git leaves in a workspace, without asking either.

A run repairs its workspace before it starts; `dpo doctor` reports the same, and `dpo doctor --fix` repairs it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

from tasks.runs import dvc_lock

GIT_LOCK_AGE = 5.0  # seconds after which a git lock that no process holds counts as left behind


def dvc_problems(workspace: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a killed DVC left in a workspace, each with the function that repairs it."""
    rwlock, (running, gone) = dvc_lock.rwlock(workspace), dvc_lock.rwlock_holders(workspace)
    if 0 in gone:
        yield f"{rwlock} is damaged, and DVC refuses every command because of it", rwlock.unlink
    elif gone and not running:  # otherwise DVC removes the entries of the others itself
        pids = ", ".join(map(str, sorted(gone)))
        yield f"{rwlock} names processes that are gone ({pids})", rwlock.unlink
    if dvc_lock.is_lock_damaged(workspace):
        problem = f"{workspace / 'dvc.lock'} is damaged (DVC was killed while it wrote the file)"
        yield problem, partial(dvc_lock.set_lock_aside, workspace)


def repair(workspace: Path) -> None:
    """Repair a workspace whose lock we hold."""
    for problem, remedy in dvc_problems(workspace):
        remedy()
        print(f"{problem}: repaired", flush=True)


def git_locks(folder: Path) -> list[Path]:
    """Lock files in git's folder that are old enough to be left behind, if no git works in the repository."""
    patterns = ("*.lock", "worktrees/*/*.lock", "refs/**/*.lock", "worktrees/*/refs/**/*.lock")
    locks = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return [path for path in locks if age(path) > GIT_LOCK_AGE] if locks and not _git_works(folder.parent) else []


def clear_git_lock(path: Path, root: Path) -> bool:
    """Remove a lock of a killed git once it is clear that nobody holds it; whether it was removed."""
    time.sleep(max(0.0, GIT_LOCK_AGE - age(path)))
    if _git_works(root) or not path.name.endswith(".lock") or (path.exists() and age(path) < GIT_LOCK_AGE):
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
        except (psutil.AccessDenied, OSError):  # another user's git: it may work here
            return True
    return False


def age(path: Path) -> float:
    """Seconds since a file was last changed; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
