"""Creates, opens and closes workspaces of runs: a git worktree, or the checkout for `dpo run` without options.

A worktree is made from a snapshot commit (uncommitted changes included, the branch untouched) and shares the
checkout's DVC cache. When its stages are done, the run is the commit `runs/<name>` and its artifacts are in the cache;
when it ends, its worktree is removed. A run that failed, was stopped or crashed keeps its worktree, and `dpo resume
NAME` continues there.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import run
from typing import Any

import yaml

from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.lifecycle import reuse
from tasks.runs import commits, crash_recovery, records, run_config
from tasks.runs.commits import find_commit, git
from tasks.runs.names import check_name
from tasks.runs.records import RunRecord
from tasks.runs.run_config import ConfigFiles
from tasks.runs.workspace import Workspace, check_out_results, remove_worktree, worktrees_lock
from tasks.system.files import write_text
from tasks.system.lock import hold_workspace


def new_record(
    name: str, files: ConfigFiles, *, worktree: bool, flow_run: str, started_with: dict[str, Any] | None = None
) -> RunRecord:
    """The record of a new run, or of this flow run if Prefect retries it. Creates nothing else yet."""
    with worktrees_lock():
        existing = records.read_record(name)
        if existing and flow_run in existing.flow_runs:
            return existing
        check_free(name)
        record = RunRecord(name, str(ROOT), started_with=started_with or {})
        if worktree:
            root = str(records.WORKTREES / name)
            record = replace(record, root=root, commit=commits.snapshot(), files=files)
        return records.mark_running(record, flow_run)


def change_configuration(record: RunRecord, overrides: dict[str, Any]) -> RunRecord:
    """Give a run that is about to be resumed other values; its worktree and its commit record them."""
    root = Path(record.root)
    if not record.has_worktree:
        raise UserError(f"The run {record.name} worked in the checkout. Edit params.yaml, then `dpo run`.")
    record = _with_worktree(record)
    with hold_workspace(root):
        files = run_config.changed_on_resume(root, overrides)
        _write_files(root, files)
    return record.write(files=record.files | files)


def _write_files(root: Path, files: ConfigFiles) -> None:
    for path, content in files.items():
        write_text(root / path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def check_free(name: str) -> None:
    """UserError if no new run can have this name."""
    record = records.read_record(check_name(name))
    if record or (records.runs_folder() / name).exists() or (records.WORKTREES / name).exists() or find_commit(name):
        raise UserError(f"There is a run named '{name}' already. {_instead(record)}, or choose another name.")


def _instead(record: RunRecord | None) -> str:
    """What to do with a run that has the name already."""
    if record is None:  # DVC's stages by hand, or what an old run left
        return "Look at it with `dpo runs`"
    if (state := record.current_state) == records.RUNNING:
        return f"It is running in process {record.pid} since {record.since}: wait until it ends"
    if state == records.FINISHED:
        return "It is finished: look at it with `dpo runs` and `dpo open`"
    return f"It has not finished ({state}): continue it with `dpo resume {record.name}`"


@contextmanager
def open_workspace(record: RunRecord, flow_run: str) -> Iterator[Workspace]:
    """Lock the workspace of a run, and create its worktree if needed; at the end, record the run's state."""
    root = Path(record.root)
    if record.has_worktree:
        record = _with_worktree(record)
    with hold_workspace(root) as token:
        workspace, record = Workspace(root, record.name, token), records.mark_running(record, flow_run)
        crash_recovery.repair(root)
        if not record.has_worktree:
            _reuse_worktree_results(workspace)
        state = records.STOPPED  # by Ctrl-C, by Prefect, or by a signal
        try:
            yield workspace
            records.keep_results(record)
            state = records.FINISHED
        except Exception:
            state = records.FAILED
            raise
        finally:
            crash_recovery.repair(root)  # Ctrl-C kills DVC, which leaves its lock
            record.write(state=state, until=records.timestamp())


def commit_results(workspace: Workspace) -> None:
    """Make the run a commit once its stages are done, before a registered version or the champion leads to it."""
    if workspace.is_worktree:
        commits.commit_run(workspace.root, workspace.run_name)
    else:
        with suppress(UserError):  # a checkout without any commit works too
            commits.commit_checkout_run(workspace.run_name)


def close_workspace(workspace: Workspace) -> Path:
    """Remove a finished run's worktree; the folder that has its small results from now on."""
    if not workspace.is_worktree:
        return ROOT
    with hold_workspace(workspace.root), worktrees_lock():  # a process that works there keeps it
        remove_worktree(workspace.root)
    return records.find_run(workspace.run_name).results()


def _with_worktree(record: RunRecord) -> RunRecord:
    """Create the run's worktree, unless it is complete and git still knows it."""
    root = Path(record.root)
    if record.worktree_ready and _is_worktree(root):
        return record
    with worktrees_lock():
        if root.exists():
            remove_worktree(root)
        git(ROOT, "worktree", "prune")
        git(ROOT, "worktree", "add", "--force", "--force", "--detach", str(root), record.commit)
    _write_files(root, record.files)
    crash_recovery.repair(root)  # the checkout's dvc.lock came along, damaged or not
    reuse.fill_lock(root)
    check_out_results(Workspace(root, record.name), "reflink,hardlink,copy")
    return record.write(worktree_ready=True)


def _reuse_worktree_results(checkout: Workspace) -> None:
    """Check out results of runs in worktrees, so that the checkout does not compute them again."""
    with suppress(UserError):  # without a commit, or with files that DVC would not overwrite, DVC runs the stages
        if stages := reuse.fill_lock(checkout.root):
            checkout.dvc("checkout", "--allow-missing", "--quiet", *stages)


def _is_worktree(root: Path) -> bool:
    """Whether the folder is a worktree for git: a killed git may have left it without a complete entry."""
    command = ["git", "rev-parse", "--show-toplevel", "--verify", "HEAD"]
    process = run(command, cwd=root, capture_output=True, text=True) if root.exists() else None
    return process is not None and process.returncode == 0 and Path(process.stdout.splitlines()[0]) == root.resolve()
