"""The workspace of a run: a git worktree of its own, or the checkout itself for `dpo run` on params.yaml as it is.

A worktree is made from a snapshot commit (uncommitted changes included, the branch untouched) and shares the
checkout's DVC cache. A finished run is the commit `runs/<name>`, its artifacts are in the cache, and its worktree is
removed. A run that failed, was stopped or crashed keeps its worktree, and `dpo resume NAME` continues there.
"""

import shutil
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import run
from typing import Any

import yaml

from tasks.cluster import kept_ray
from tasks.config.paths import ROOT
from tasks.config.strict import read_yaml
from tasks.errors import UserError
from tasks.runs import commits, crash_recovery, dvc, dvc_lock, records, reuse, run_config
from tasks.runs.commits import git
from tasks.runs.records import RunRecord
from tasks.runs.run_config import ConfigFiles
from tasks.system.files import write_text
from tasks.system.lock import TOKEN, exclusive, hold_workspace


@dataclass(frozen=True)
class Workspace:
    root: Path
    run_name: str  # unchanged when the run is retried or resumed
    lock_token: str | None = None  # lets processes that we start here pass the workspace's lock
    ray_session: Path | None = None  # the folder of the Ray cluster that the flow keeps for its stages

    @property
    def is_worktree(self) -> bool:
        return self.root != ROOT

    @property
    def run_folder(self) -> Path:
        """The run's records, journals and logs; it stays when the worktree is removed."""
        return records.runs_folder() / self.run_name

    def environment(self) -> dict[str, str]:
        """The environment of a stage: the run it belongs to, and the checkout that keeps state across workspaces."""
        token = {TOKEN: self.lock_token} if self.lock_token else {}
        return dvc.environment(
            DPO_RUN=self.run_name, DPO_HOME=str(ROOT), **token, **kept_ray.variables(self.ray_session)
        )

    def stages(self) -> list[str]:
        """The stages in the order of dvc.yaml, which is the order of the pipeline."""
        return list(dvc_lock.stages(self.root))

    def is_off(self, stage: str) -> bool:
        """Whether params.yaml leaves out the optional stage."""
        return dvc_lock.is_off(stage, read_yaml(self.root / "params.yaml"))

    def stale_stages(self) -> set[str]:
        return dvc.stale_stages(self.dvc("status", "--json")) & set(self.stages())

    def watch(self) -> list[str]:
        """Run the stage `watch`, so that DVC sees changed content behind an address of `source`; its messages."""
        lines = self.dvc("repro", "--single-item", "watch").splitlines()
        return [line for line in lines if line.startswith("watch: ")]

    def dvc(self, *arguments: str) -> str:
        return dvc.call(self.root, *arguments, env=self.environment())


@contextmanager
def ray_kept(workspace: Workspace, stale: Collection[str]) -> Iterator[Workspace]:
    """One embedded Ray cluster for all stages that will run. It starts while the first of them computes."""
    stages = workspace.stages()
    with kept_ray.keep_if_needed(workspace.root, workspace.environment(), stale, stages) as session:
        yield replace(workspace, ray_session=session)


def new_record(name: str, files: ConfigFiles, *, worktree: bool, flow_run: str) -> RunRecord:
    """The record of a new run, or of this flow run if Prefect retries it. Creates nothing else yet."""
    with worktrees_lock():
        existing = records.read_record(name)
        if existing and flow_run in existing.flow_runs:
            return existing
        _check_name(name)
        if not worktree:
            return records.mark_running(RunRecord(name, str(ROOT)), flow_run)
        record = RunRecord(name, str(records.WORKTREES / name), commit=commits.snapshot(), files=files)
        return records.mark_running(record, flow_run)


def change_configuration(record: RunRecord, overrides: dict[str, Any]) -> RunRecord:
    """Give a run that is about to be resumed other values; its worktree and its commit record them."""
    root = Path(record.root)
    if not record.has_worktree:
        raise UserError(f"The run {record.name} worked in the checkout. Edit params.yaml, then `dpo run`.")
    if not (record.made and _is_worktree(root)):
        record = _create_worktree(record)
    with hold_workspace(root):
        files = run_config.changed_on_resume(root, overrides)
        _write_files(root, files)
    return record.write(files=record.files | files)


def _write_files(root: Path, files: ConfigFiles) -> None:
    for path, content in files.items():
        write_text(root / path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _check_name(name: str) -> None:
    invalid = run(["git", "check-ref-format", "--branch", f"runs/{name}"], capture_output=True).returncode
    if invalid or "/" in name or name.startswith((".", "-")):
        raise UserError(f"A run cannot be named '{name}'. Use letters, digits, dots and dashes.")
    if (records.runs_folder() / name).exists() or (records.WORKTREES / name).exists() or commits.find_commit(name):
        record = records.read_record(name)
        resume = f"continue it with `dpo resume {name}`, " if record and record.state != records.FINISHED else ""
        raise UserError(
            f"There is a run named '{name}' already. Choose another name, {resume}or look at it with `dpo runs`."
        )


@contextmanager
def open_workspace(record: RunRecord, flow_run: str) -> Iterator[Workspace]:
    """Lock the workspace of a run, and create its worktree if needed; at the end, record the run's state."""
    root = Path(record.root)
    if record.has_worktree and not (record.made and _is_worktree(root)):
        record = _create_worktree(record)
    with hold_workspace(root) as token:
        workspace, record = Workspace(root, record.name, token), records.mark_running(record, flow_run)
        for sentence in crash_recovery.repair(root):
            print(f"{record.name}: {sentence}", flush=True)
        if not record.has_worktree:
            _reuse_worktree_results(workspace)
        state = records.STOPPED  # by Ctrl-C, by Prefect, or by a signal
        try:
            yield workspace
            if record.has_worktree:
                commits.commit_run(root, record.name)
            else:
                with suppress(UserError):  # a checkout without any commit works too
                    commits.commit_checkout_run(record.name)
            records.keep_results(record)
            state = records.FINISHED
        except Exception:
            state = records.FAILED
            raise
        finally:
            crash_recovery.repair(root)  # Ctrl-C kills DVC, which leaves its lock
            record.write(state=state, until=records.timestamp())


def close_workspace(workspace: Workspace) -> Path:
    """Remove a finished run's worktree; the folder that has its small results from now on."""
    if not workspace.is_worktree:
        return ROOT
    with hold_workspace(workspace.root), worktrees_lock():  # a process that works there keeps it
        remove_worktree(workspace.root)
    return records.find_run(workspace.run_name).results()


def _create_worktree(record: RunRecord) -> RunRecord:
    root = Path(record.root)
    with worktrees_lock():
        if root.exists():
            remove_worktree(root)
        git(ROOT, "worktree", "prune")
        git(ROOT, "worktree", "add", "--force", "--force", "--detach", str(root), record.commit)
    _write_files(root, record.files)
    crash_recovery.repair(root)  # the checkout's dvc.lock came along, damaged or not
    reuse.fill_lock(root)
    check_out_results(Workspace(root, record.name), "reflink,hardlink,copy")
    return record.write(made=True)


def _reuse_worktree_results(checkout: Workspace) -> None:
    """Check out results of runs in worktrees, so that the checkout does not compute them again."""
    with suppress(UserError):  # without a commit, or with files that DVC would not overwrite, DVC runs the stages
        if stages := reuse.fill_lock(checkout.root):
            checkout.dvc("checkout", "--allow-missing", "--quiet", *stages)


def _is_worktree(root: Path) -> bool:
    """Whether git still knows the folder: a kill may have left git's notes of it missing or incomplete."""
    command = ["git", "rev-parse", "--show-toplevel", "--verify", "HEAD"]
    process = run(command, cwd=root, capture_output=True, text=True) if root.exists() else None
    return process is not None and process.returncode == 0 and Path(process.stdout.splitlines()[0]) == root.resolve()


def remove_worktree(root: Path) -> None:
    """Remove the folder and git's notes of it; git itself refuses if one of them is missing or incomplete."""
    try:
        git(ROOT, "worktree", "remove", "--force", "--force", str(root))
    except UserError:
        if not root.is_relative_to(ROOT / ".scratch"):
            raise
        shutil.rmtree(root, ignore_errors=True)
        notes = Path(git(ROOT, "rev-parse", "--path-format=absolute", "--git-common-dir")) / "worktrees"
        for note in notes.glob("*/"):
            gitdir = note / "gitdir"
            if not gitdir.exists() or gitdir.read_text().strip() in ("", str(root / ".git")):
                shutil.rmtree(note)


def worktrees_lock() -> AbstractContextManager[None]:
    """One process at a time changes git's list of worktrees and our list of names."""
    return exclusive(ROOT / ".scratch" / "worktrees.lock", lambda holder: None)


def check_out_results(workspace: Workspace, links: str | None = None) -> None:
    """Let a worktree use the checkout's DVC cache, and check out what its dvc.lock names.

    `links` is for a worktree in which nothing is changed in place: stages publish their results by renaming.
    """
    dvc.write_worktree_config(workspace.root, links)
    if (workspace.root / "dvc.lock").exists():
        workspace.dvc("checkout", "--allow-missing", "--quiet")
