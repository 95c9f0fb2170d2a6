"""Leftovers of killed processes: our locks, those of DVC and git, and damaged records."""

from functools import partial
from pathlib import Path

from tasks.doctor.report import Report
from tasks.runs import crash_recovery, dvc_lock, records
from tasks.system.lock import file_lock, workspace_holder


def locks(report: Report, root: Path) -> None:
    before = report.problems
    for workspace in (root, *sorted((root / ".scratch" / "worktrees").glob("*/"))):
        if holder := workspace_holder(workspace):  # of a killed one, the kernel has released the lock
            process = f"process {holder['pid']} (`{holder['command']}`, since {holder['since']})"
            report.note(f"a run is using {workspace}: {process}")
        _dvc(report, workspace)
    for path in crash_recovery.git_locks(root / ".git"):
        minutes = crash_recovery.age(path) / 60
        report.stale(f"{path} was left behind {minutes:.0f} minutes ago by a git that is gone", path.unlink)
    for path in records.damaged_records():  # `dpo runs` skips such a run, and `dpo gc` keeps it
        report.stale(f"{path} is empty or damaged", partial(path.replace, path.with_name("record.json.damaged")))
    if report.problems == before and not report.fix:
        report.ok("no stale locks")


def _dvc(report: Report, workspace: Path) -> None:
    lock = workspace / ".dvc" / "tmp" / "lock"
    if lock.exists():
        with file_lock(lock, wait=False) as acquired:
            if not acquired:
                report.note(f"DVC is running in {workspace}: wait until it ends")
                return
    for problem, remedy in crash_recovery.dvc_problems(workspace):
        report.stale(problem, remedy)
    if running := dvc_lock.rwlock_holders(workspace)[0]:
        report.note(f"DVC holds files in {workspace}: process {', '.join(map(str, sorted(running)))}")
