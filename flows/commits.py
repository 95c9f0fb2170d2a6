"""What git holds of runs: the snapshot that one starts from, and the commit that it ends as.

Nothing here touches the checkout's branch, its index or its files.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, run

from flows import ROOT
from tasks.errors import UserError
from tasks.machines.crashes import clear_git_lock
from tasks.place import OVERRIDES, RECIPE

BRANCHES = "refs/heads/runs"
HIDDEN = "refs/runs"  # of runs in the checkout itself: they are kept, and `git branch` does not show them
LOCKED = re.compile(r"Unable to create '(?P<path>[^']+\.lock)': File exists")
CODE = ("flows", "tasks", "training")


def git(root: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    known = run(["git", "config", "user.email"], cwd=root, capture_output=True).returncode == 0
    who = [] if known else ["-c", "user.name=dpo", "-c", "user.email=dpo@localhost"]
    given = None if env is None else {**os.environ, **env}
    command = ["git", *who, *arguments]
    done = run(command, cwd=root, env=given, stdin=DEVNULL, capture_output=True, text=True)
    while (left := LOCKED.search(done.stderr)) and clear_git_lock(Path(left["path"]), ROOT):  # of a git that was killed
        done = run(command, cwd=root, env=given, stdin=DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"`git {' '.join(arguments)}` failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip()


def snapshot(root: Path = ROOT) -> str:
    """A commit of the tracked files as they are now, with what is new in our own code; HEAD where that is the same."""
    if run(["git", "rev-parse", "--verify", "HEAD"], cwd=root, capture_output=True).returncode:
        raise UserError(f"{root} has no commit yet, and a run of its own works from one. Run `git commit`.")
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        shutil.copy(root / git(root, "rev-parse", "--git-path", "index"), index)  # it knows which files are unchanged
        env = {"GIT_INDEX_FILE": str(index)}
        git(root, "add", "--update", env=env)
        if new := [name for name in untracked(root) if ours(name)]:
            git(root, "add", "--force", "--", *new, env=env)
        tree = git(root, "write-tree", env=env)
    if tree == git(root, "rev-parse", "HEAD^{tree}"):
        return git(root, "rev-parse", "HEAD")
    return git(root, "commit-tree", tree, "-p", "HEAD", "-m", "The checkout as a run found it")


def ours(name: str) -> bool:
    """Of untracked files a run needs new code, new recipes and DVC's lock; data it reads from the checkout."""
    return name == "dvc.lock" or (name.split("/")[0] in CODE and name.endswith((".py", ".yaml")))


def untracked(root: Path = ROOT) -> list[str]:
    return git(root, "ls-files", "--others", "--exclude-standard").splitlines()


def commit_run(root: Path, name: str) -> str:
    """A worktree's params, code and dvc.lock as the branch runs/<name>."""
    git(root, "add", "--update")
    git(root, "add", "--force", "dvc.lock", *(str(path) for path in (RECIPE, OVERRIDES) if (root / path).exists()))
    if git(root, "status", "--porcelain", "--untracked-files=no"):
        git(root, "commit", "--quiet", "--no-verify", "--message", f"The run {name}")
    git(root, "update-ref", f"{BRANCHES}/{name}", "HEAD")
    return git(root, "rev-parse", "HEAD")


def note_run(name: str) -> str:
    """A run in the checkout is a commit, too: a hidden one, of the checkout as it is."""
    commit = snapshot()
    git(ROOT, "update-ref", f"{HIDDEN}/{name}", commit)
    return commit


def forget(name: str) -> None:
    for place in (BRANCHES, HIDDEN):
        git(ROOT, "update-ref", "-d", f"{place}/{name}")


def find(name: str) -> str | None:
    """The commit of a finished run."""
    for candidate in (f"{BRANCHES}/{name}", f"{HIDDEN}/{name}"):
        found = run(
            ["git", "rev-parse", "--verify", "--quiet", f"{candidate}^{{commit}}"], cwd=ROOT, capture_output=True
        )
        if found.returncode == 0:
            return found.stdout.decode().strip()
    return None


def commit_of(name: str) -> str:
    """Of a run by its name, or any commit."""
    if found := find(name):
        return found
    try:
        return git(ROOT, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except UserError:
        known = ", ".join(finished()) or "none yet"
        raise UserError(f"There is no finished run '{name}'. Runs: {known}; a commit serves as well.") from None


def finished() -> list[str]:
    """Names of runs that ended as a commit, newest first."""
    refs = git(ROOT, "for-each-ref", "--sort=-committerdate", "--format=%(refname)", BRANCHES, HIDDEN).splitlines()
    return [ref.removeprefix(f"{BRANCHES}/").removeprefix(f"{HIDDEN}/") for ref in refs]


def show(commit: str, path: str) -> str | None:
    """A file of a commit; None where it has none."""
    done = run(["git", "show", f"{commit}:{path}"], cwd=ROOT, stdin=DEVNULL, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None
