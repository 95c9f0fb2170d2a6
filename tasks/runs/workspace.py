"""The workspace of a run, in which its stages execute: a git worktree, or the checkout itself."""

import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.checkout import HOME, RUN
from tasks.cluster import kept_ray
from tasks.config.paths import ROOT
from tasks.config.strict import read_yaml
from tasks.errors import UserError
from tasks.runs import dvc, dvc_lock, older_code, records
from tasks.runs.commits import git
from tasks.system.lock import TOKEN, exclusive


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
        site = older_code.site_variable(self.root) if self.is_worktree else {}
        own = {HOME: str(ROOT), RUN: self.run_name}
        return dvc.environment(**own, **token, **site, **kept_ray.variables(self.ray_session))

    def stages(self) -> list[str]:
        """The stages in the order of dvc.yaml, which is the order of the pipeline."""
        return list(dvc_lock.stages(self.root))

    def is_disabled(self, stage: str) -> bool:
        """Whether params.yaml leaves out the optional stage."""
        return dvc_lock.is_disabled(stage, read_yaml(self.root / "params.yaml"))

    def stale_stages(self) -> set[str]:
        status = self.dvc("status", "--json")
        return set(json.loads(status[status.index("{") :])) & set(self.stages())

    def fingerprint(self) -> list[str]:
        """Run the stage `fingerprint`, so that DVC sees changed content behind an address of `source`; its messages."""
        lines = self.dvc("repro", "--single-item", "fingerprint").splitlines()
        return [line for line in lines if line.startswith("fingerprint: ")]

    def dvc(self, *arguments: str) -> str:
        return dvc.call(self.root, *arguments, env=self.environment())


@contextmanager
def ray_kept(workspace: Workspace, stale: Collection[str]) -> Iterator[Workspace]:
    """One embedded Ray cluster for all stages that will run. It starts while the first of them computes."""
    stages = workspace.stages()
    with kept_ray.keep_if_needed(workspace.root, workspace.environment(), stale, stages) as session:
        yield replace(workspace, ray_session=session)


def remove_worktree(root: Path) -> None:
    """Remove the worktree's folder and its entry in .git/worktrees."""
    try:
        git(ROOT, "worktree", "remove", "--force", "--force", str(root))
    except UserError:
        if not root.is_relative_to(ROOT / ".scratch"):
            raise
        # git refuses if a killed git left the folder or the entry incomplete.
        shutil.rmtree(root, ignore_errors=True)
        git(ROOT, "worktree", "prune")


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
