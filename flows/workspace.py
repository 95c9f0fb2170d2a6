"""Where a run works: in the checkout itself, or, when it changes params.yaml, in a git worktree of its own.

A worktree is made from a snapshot commit (uncommitted changes included, the branch untouched), shares the checkout's
DVC cache, and stays in .scratch/worktrees/<name>; its params.yaml and dvc.lock are committed to `runs/<name>`.
"""

import configparser
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, run
from typing import Any

import yaml

from flows import ROOT
from tasks.errors import UserError
from tasks.lock import workspace_lock
from tasks.stage import QUIET

Files = dict[str, dict[str, Any]]  # what a run's own configuration files hold, by name


@dataclass(frozen=True)
class Workspace:
    root: Path
    key: str  # of this pipeline run; the same when the flow run is retried

    @property
    def own(self) -> bool:
        return self.root != ROOT

    @property
    def logs(self) -> Path:
        from tasks.params import load_cluster

        return ROOT / load_cluster().logging_dir / self.key

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return {**QUIET, **os.environ, "PATH": path, **self.identity()}

    def identity(self) -> dict[str, str]:
        """What a stage must know: which run it belongs to, and where state that outlives the workspace is kept."""
        return {"DPO_RUN": self.key, "DPO_HOME": str(ROOT)}

    def stages(self) -> list[str]:
        """The stages in the order of dvc.yaml, which is the order of the pipeline."""
        return list(yaml.safe_load((self.root / "dvc.yaml").read_text())["stages"])

    def stale(self) -> set[str]:
        status = self.dvc("status", "--json")
        return set(json.loads(status[status.index("{") :]))

    def source_changed(self) -> bool:
        """Whether a file behind source.data or source.model changed in place, which DVC does not see."""
        from tasks.params import load_params
        from tasks.source import changed

        return changed(load_params(self.root / "params.yaml").source, self.root)

    def dvc(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "dvc", *arguments]
        done = run(command, cwd=self.root, env=self.environment(), stdin=DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise UserError(f"`dvc {' '.join(arguments)}` failed in {self.root}: {done.stderr.strip()}")
        return done.stdout


def plan(recipe: str | None, overrides: dict[str, Any] | None) -> Files:
    """params.yaml and infra/cluster.yaml with the recipe and the overrides laid over, checked: those that change."""
    from tasks.params import Cluster, Params, dotted, overlay, read_recipe, read_yaml, validate

    parts = [f"the recipe {recipe}"] if recipe else []
    laid_over = " and ".join(parts + ["overrides"] * bool(overrides))
    files: Files = {}
    for name, part, model in (("params.yaml", "params", Params), ("infra/cluster.yaml", "cluster", Cluster)):
        content = read_yaml(ROOT / name)
        given = validate(model, content, ROOT / name)
        if recipe:
            content = overlay(content, read_recipe(recipe, part), model)
        if part == "params":
            content = overlay(content, dotted(overrides or {}), model)
        if validate(model, content, Path(f"{name} with {laid_over}")) != given:
            files[name] = content
    return files


@contextmanager
def opened(key: str, name: str | None, files: Files) -> Iterator[Workspace]:
    """The locked workspace of a run; `files` is what `plan` returned."""
    workspace = Workspace(ROOT / ".scratch" / "worktrees" / (name or key) if files else ROOT, key)
    if files:
        _make_worktree(workspace, name or key, files)
    with workspace_lock(workspace.root):
        yield workspace
        if files:
            _commit(workspace.root, f"runs/{name or key}", files)


def untracked() -> list[str]:
    """Files that a snapshot leaves out."""
    return git(ROOT, "ls-files", "--others", "--exclude-standard").splitlines()


def _make_worktree(workspace: Workspace, name: str, files: Files) -> None:
    note = workspace.logs / "worktree"
    if note.exists() and workspace.root.exists():  # this flow run again: it continues in what it has
        return
    branch = f"runs/{name}"
    if run(["git", "check-ref-format", "--branch", branch], capture_output=True).returncode or "/" in name:
        raise UserError(f"A run cannot be named '{name}'. Use letters, digits, dots and dashes.")
    if workspace.root.exists() or git(ROOT, "branch", "--list", branch):
        raise UserError(
            f"There is a run named '{name}' already. Choose another name, or remove it with "
            f"`git worktree remove --force {workspace.root}` and `git branch -D {branch}`."
        )
    git(ROOT, "worktree", "prune")
    git(ROOT, "worktree", "add", "--detach", str(workspace.root), _snapshot())
    for path, content in files.items():
        (workspace.root / path).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    share_cache(workspace)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"{workspace.root}\n")


def _snapshot() -> str:
    """A commit of the checkout's tracked files as they are, made without touching branch, index or files."""
    if run(["git", "rev-parse", "--verify", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        raise UserError(f"{ROOT} has no commit yet, and a run with other params works from one. Run `git commit`.")
    return git(ROOT, "stash", "create") or git(ROOT, "rev-parse", "HEAD")


def share_cache(workspace: Workspace) -> None:
    """Let the worktree use the checkout's cache, and put there what the checkout's dvc.lock already has."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / ".dvc" / "config.local")
    if not config.has_section("cache"):
        config.add_section("cache")
    config["cache"]["dir"] = Workspace(ROOT, workspace.key).dvc("cache", "dir").strip()
    with (workspace.root / ".dvc" / "config.local").open("w") as file:
        config.write(file)
    workspace.dvc("checkout", "--allow-missing", "--quiet")


def _commit(root: Path, branch: str, files: Files) -> None:
    git(root, "add", "--force", *files, "dvc.lock")
    if git(root, "status", "--porcelain", "--untracked-files=no"):
        git(root, "commit", "--quiet", "--no-verify", "--message", f"The run {branch.removeprefix('runs/')}")
    git(root, "branch", "--force", branch, "HEAD")


def git(root: Path, *arguments: str) -> str:
    known = run(["git", "config", "user.email"], cwd=root, capture_output=True).returncode == 0
    who = [] if known else ["-c", "user.name=dpo", "-c", "user.email=dpo@localhost"]
    done = run(["git", *who, *arguments], cwd=root, stdin=DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"`git {' '.join(arguments)}` failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip()
