"""Locks that a killed process left behind: DVC's, git's, torch's extension builds, ours."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tasks.doctor.findings import Findings

OLD = 600.0  # seconds after which a lock without a living owner is no longer somebody's
BUILDERS = {"ninja", "nvcc", "cicc", "ptxas", "cc1plus", "c++", "g++"}


def locks(found: Findings, root: Path) -> None:
    before, fix = found.bad, found.fix
    for workspace in (root, *sorted((root / ".scratch" / "worktrees").glob("*/"))):
        _ours(found, workspace)
        _dvc(found, workspace / ".dvc" / "tmp")
    _git(found, root / ".git")
    _torch(found, _extensions())
    if found.bad == before and not fix:
        found.good("no lock was left behind")


def _ours(found: Findings, workspace: Path) -> None:
    """The kernel releases it with its holder; what the holder wrote about itself may stay."""
    path = workspace / ".scratch" / "run.lock"
    if not path.exists() or not path.read_text().strip():
        return
    holder = _parsed(path.read_text())
    if _taken(path):
        who = f"process {holder.get('pid', '?')} (`{holder.get('command', '?')}`, since {holder.get('since', '?')})"
        found.note(f"a run is at work in {workspace}: {who}")
    else:
        note = f"{path} still names process {holder.get('pid', '?')}, which was killed"
        found.stale(note, lambda: path.write_text(""))


def _dvc(found: Findings, folder: Path) -> None:
    if (folder / "lock").exists() and _taken(folder / "lock"):
        found.note(f"DVC is at work in {folder.parents[1]}: wait until it ends")
        return
    path = folder / "rwlock"
    if not path.exists():
        return
    try:
        pids = set(_pids(json.loads(path.read_text())))
    except (ValueError, AttributeError, TypeError, KeyError):
        found.stale(f"{path} is damaged, and DVC refuses every command because of it", path.unlink)
        return
    alive = sorted(pid for pid in pids if psutil.pid_exists(pid))
    if alive:
        found.note(f"DVC holds files in {folder.parents[1]}: process {', '.join(map(str, alive))}")
    elif pids:
        dead = ", ".join(map(str, sorted(pids)))
        found.stale(f"{path} names processes that are gone ({dead})", path.unlink)


def _pids(content: dict) -> Iterator[int]:
    for one in content.get("write", {}).values():
        yield int(one["pid"])
    for several in content.get("read", {}).values():
        yield from (int(one["pid"]) for one in several)


def _git(found: Findings, folder: Path) -> None:
    """Git leaves index.lock behind when it is killed, and then refuses to commit."""
    working = _running({"git"})
    for path in sorted([*folder.glob("*.lock"), *folder.glob("worktrees/*/*.lock")]):
        if path.name != "locked" and _age(path) > OLD and not working:
            found.stale(f"{path} was left behind {_age(path) / 60:.0f} minutes ago by a git that is gone", path.unlink)


def _torch(found: Findings, folder: Path) -> None:
    """torch waits for ever for a build whose process was killed."""
    building = _running(BUILDERS)
    for path in sorted(folder.glob("**/lock")):
        if building or _age(path) < OLD:
            found.note(f"an extension of torch's is being built: {path.parent}")
        else:
            found.stale(
                f"{path}: a killed build left it {_age(path) / 60:.0f} minutes ago, and every run waits", path.unlink
            )


def _extensions() -> Path:
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def _taken(path: Path) -> bool:
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _running(names: set[str]) -> bool:
    return any(process.info["name"] in names for process in psutil.process_iter(["name"]))


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _parsed(text: str) -> dict[str, str]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
