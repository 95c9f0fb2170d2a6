"""Leftovers of killed processes: our locks, those of DVC, git and torch's extension builds, and damaged files."""

import os
import shutil
from functools import partial
from pathlib import Path

import psutil

from tasks.doctor.report import Report
from tasks.runs import crash_recovery, dvc_lock
from tasks.system.files import recall
from tasks.system.lock import file_lock, workspace_holder

STALE_SECONDS = 600.0  # the age at which a lock without a living owner is stale
BUILDERS = {"ninja", "nvcc", "cicc", "ptxas", "cc1plus", "c++", "g++"}


def locks(report: Report, root: Path) -> None:
    before, fix = report.problems, report.fix
    for workspace in (root, *sorted((root / ".scratch" / "worktrees").glob("*/"))):
        _workspace_lock(report, workspace)
        _dvc(report, workspace)
    _git(report, root / ".git")
    _worktrees(report, root)
    _records(report, root)
    _torch(report, _extensions())
    if report.problems == before and not fix:
        report.ok("no stale locks")


def _workspace_lock(report: Report, workspace: Path) -> None:
    """The kernel releases the lock with its holder. A killed holder's name stays in the file and blocks nothing."""
    if holder := workspace_holder(workspace):
        process = f"process {holder['pid']} (`{holder['command']}`, since {holder['since']})"
        report.note(f"a run is using {workspace}: {process}")


def _dvc(report: Report, workspace: Path) -> None:
    lock = workspace / ".dvc" / "tmp" / "lock"
    if lock.exists() and _is_locked(lock):
        report.note(f"DVC is running in {workspace}: wait until it ends")
        return
    for problem, remedy in crash_recovery.dvc_problems(workspace):
        report.stale(problem, remedy)
    if running := dvc_lock.rwlock_holders(workspace)[0]:
        report.note(f"DVC holds files in {workspace}: process {', '.join(map(str, sorted(running)))}")


def _git(report: Report, folder: Path) -> None:
    """Git leaves index.lock behind when it is killed, and then refuses to commit."""
    for path in crash_recovery.git_locks(folder):
        minutes = crash_recovery.age(path) / 60
        report.stale(f"{path} was left behind {minutes:.0f} minutes ago by a git that is gone", path.unlink)


def _worktrees(report: Report, root: Path) -> None:
    """Folders that git does not know as worktrees, and worktrees whose folder is gone."""
    if not (root / ".git").is_dir():
        return
    known = {Path(_link(path)).parent for path in root.glob(".git/worktrees/*/gitdir")}
    for folder in sorted((root / ".scratch" / "worktrees").glob("*/")):
        if folder.resolve() not in known:
            note = f"{folder} is not a git worktree any more; `dpo resume {folder.name}` creates it again"
            report.stale(note, partial(shutil.rmtree, folder))
    for path in root.glob(".git/worktrees/*/gitdir"):
        if not Path(_link(path)).exists():
            note = f"git has a worktree {path.parent.name} whose folder is gone"
            report.stale(note, partial(shutil.rmtree, path.parent))


def _link(path: Path) -> str:
    return path.read_text().strip() or "/nowhere/.git"


def _records(report: Report, root: Path) -> None:
    """Damaged records: `dpo runs` skips such a run, and `dpo gc` keeps it."""
    for path in sorted(root.glob(".scratch/runs/*/record.json")):
        if not recall(path):
            aside = path.with_name("record.json.damaged")
            report.stale(f"{path} is empty or damaged", partial(path.replace, aside))


def _torch(report: Report, folder: Path) -> None:
    """torch waits for ever for a build whose process was killed."""
    building = _any_running(BUILDERS)
    for path in sorted(folder.glob("**/lock")):
        if building or crash_recovery.age(path) < STALE_SECONDS:
            report.note(f"torch is building an extension: {path.parent}")
        else:
            report.stale(
                f"{path}: a killed build left it {crash_recovery.age(path) / 60:.0f} minutes ago, and every run waits",
                path.unlink,
            )


def _extensions() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


def _is_locked(path: Path) -> bool:
    with file_lock(path, wait=False) as acquired:
        return not acquired


def _any_running(names: set[str]) -> bool:
    return any(process.info["name"] in names for process in psutil.process_iter(["name"]))
