"""What a killed process left behind: locks of DVC, git, torch's extension builds and ours, and damaged files."""

import fcntl
import json
import os
import shutil
from functools import partial
from pathlib import Path

import psutil

from tasks.doctor.findings import Findings
from tasks.files import recall
from tasks.machines import crashes

OLD = 600.0  # seconds after which a lock without a living owner is no longer somebody's
BUILDERS = {"ninja", "nvcc", "cicc", "ptxas", "cc1plus", "c++", "g++"}


def locks(found: Findings, root: Path) -> None:
    before, fix = found.bad, found.fix
    for workspace in (root, *sorted((root / ".scratch" / "worktrees").glob("*/"))):
        _ours(found, workspace)
        _dvc(found, workspace)
    _git(found, root / ".git")
    _worktrees(found, root)
    _records(found, root)
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


def _dvc(found: Findings, workspace: Path) -> None:
    lock = workspace / ".dvc" / "tmp" / "lock"
    if lock.exists() and _taken(lock):
        found.note(f"DVC is at work in {workspace}: wait until it ends")
        return
    path, gone = crashes.rwlock(workspace), crashes.gone_from_rwlock(workspace)
    if 0 in gone:
        found.stale(f"{path} is damaged, and DVC refuses every command because of it", path.unlink)
    elif gone:
        dead = ", ".join(map(str, sorted(gone)))
        found.stale(f"{path} names processes that are gone ({dead})", lambda: crashes.clear_rwlock(workspace))
    if alive := crashes.holders(workspace):
        found.note(f"DVC holds files in {workspace}: process {', '.join(map(str, alive))}")
    if crashes.has_damaged_lock(workspace):
        note = f"{workspace / 'dvc.lock'} is damaged (DVC was killed while it wrote the file)"
        found.stale(note, lambda: crashes.set_lock_aside(workspace))


def _git(found: Findings, folder: Path) -> None:
    """Git leaves index.lock behind when it is killed, and then refuses to commit."""
    for path in crashes.git_locks(folder):
        minutes = crashes.age(path) / 60
        found.stale(f"{path} was left behind {minutes:.0f} minutes ago by a git that is gone", path.unlink)


def _worktrees(found: Findings, root: Path) -> None:
    """A folder that is no worktree to git any more, and a worktree whose folder is gone."""
    if not (root / ".git").is_dir():
        return
    known = {Path(_link(path)).parent for path in root.glob(".git/worktrees/*/gitdir")}
    for folder in sorted((root / ".scratch" / "worktrees").glob("*/")):
        if folder.resolve() not in known:
            note = f"{folder} is no worktree to git any more; `make resume RUN={folder.name}` makes it again"
            found.stale(note, partial(shutil.rmtree, folder))
    for path in root.glob(".git/worktrees/*/gitdir"):
        if not Path(_link(path)).exists():
            note = f"git has a worktree {path.parent.name} whose folder is gone"
            found.stale(note, partial(shutil.rmtree, path.parent))


def _link(path: Path) -> str:
    return path.read_text().strip() or "/nowhere/.git"


def _records(found: Findings, root: Path) -> None:
    """Records that are no JSON: a run with one is left out of `make runs` and kept by `make gc`."""
    for path in sorted(root.glob(".scratch/runs/*/record.json")):
        if not recall(path):
            aside = path.with_name("record.json.damaged")
            found.stale(f"{path} is empty or damaged", partial(path.replace, aside))


def _torch(found: Findings, folder: Path) -> None:
    """torch waits for ever for a build whose process was killed."""
    building = _running(BUILDERS)
    for path in sorted(folder.glob("**/lock")):
        if building or crashes.age(path) < OLD:
            found.note(f"an extension of torch's is being built: {path.parent}")
        else:
            found.stale(
                f"{path}: a killed build left it {crashes.age(path) / 60:.0f} minutes ago, and every run waits",
                path.unlink,
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


def _parsed(text: str) -> dict[str, str]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
