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
        own = {"PATH": path, "DPO_RUN": self.key, "DPO_ROOT": str(self.root), "DPO_HOME": str(ROOT)}
        return {**QUIET, **os.environ, **own}

    def stages(self) -> list[str]:
        """The stages in the order of dvc.yaml, which is the order of the pipeline."""
        return list(yaml.safe_load((self.root / "dvc.yaml").read_text())["stages"])

    def stale(self) -> set[str]:
        status = self.dvc("status", "--json")
        return set(json.loads(status[status.index("{") :]))

    def dvc(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "dvc", *arguments]
        done = run(command, cwd=self.root, env=self.environment(), stdin=DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise UserError(f"`dvc {' '.join(arguments)}` failed in {self.root}: {done.stderr.strip()}")
        return done.stdout


def plan(recipe: str | None, overrides: dict[str, Any] | None) -> dict[str, Any] | None:
    """params.yaml with the recipe and the overrides laid over it, checked; None when they change nothing."""
    from tasks.params import Params, dotted, load_cluster, overlay, read_recipe, read_yaml, validate

    load_cluster()
    path = ROOT / "params.yaml"
    content = read_yaml(path)
    given = validate(Params, content, path)
    if recipe:
        content = overlay(content, read_recipe(recipe))
    content = overlay(content, dotted(overrides or {}))
    if validate(Params, content, Path(f"params.yaml with {_laid_over(recipe, overrides)}")) == given:
        return None
    return content


def _laid_over(recipe: str | None, overrides: dict[str, Any] | None) -> str:
    parts = [f"the recipe {recipe}"] if recipe else []
    return " and ".join(parts + ["overrides"] * bool(overrides))


@contextmanager
def opened(key: str, name: str | None, params: dict[str, Any] | None) -> Iterator[Workspace]:
    """The locked workspace of a run; `params` is what `plan` returned."""
    workspace = Workspace(ROOT if params is None else ROOT / ".scratch" / "worktrees" / (name or key), key)
    if params is not None:
        _make_worktree(workspace, name or key, params)
    with workspace_lock(workspace.root):
        yield workspace
        if params is not None:
            _commit(workspace.root, f"runs/{name or key}")


def untracked() -> list[str]:
    """Files that a snapshot leaves out."""
    return git(ROOT, "ls-files", "--others", "--exclude-standard").splitlines()


def _make_worktree(workspace: Workspace, name: str, params: dict[str, Any]) -> None:
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
    (workspace.root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False, allow_unicode=True))
    _share_cache(workspace)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"{workspace.root}\n")


def _snapshot() -> str:
    """A commit of the checkout's tracked files as they are, made without touching branch, index or files."""
    if run(["git", "rev-parse", "--verify", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        raise UserError(f"{ROOT} has no commit yet, and a run with other params works from one. Run `git commit`.")
    return git(ROOT, "stash", "create") or git(ROOT, "rev-parse", "HEAD")


def _share_cache(workspace: Workspace) -> None:
    """Let the worktree use the checkout's cache, and put there what the checkout's dvc.lock already has."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / ".dvc" / "config.local")
    if not config.has_section("cache"):
        config.add_section("cache")
    config["cache"]["dir"] = Workspace(ROOT, workspace.key).dvc("cache", "dir").strip()
    with (workspace.root / ".dvc" / "config.local").open("w") as file:
        config.write(file)
    workspace.dvc("checkout", "--allow-missing", "--quiet")


def _commit(root: Path, branch: str) -> None:
    git(root, "add", "--force", "params.yaml", "dvc.lock")
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
