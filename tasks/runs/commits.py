"""Git for runs: the snapshot commit that a run starts from, and the commit that a finished run becomes.

Nothing here touches the checkout's branch, its index or its files.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, run

from tasks.config.cluster import RUN_FILES
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.runs import dvc_lock
from tasks.runs.crash_recovery import clear_git_lock
from tasks.runs.dvc_lock import Entry

BRANCHES = "refs/heads/runs"
CHECKOUT_RUNS = "refs/runs"  # runs in the checkout itself; `git branch` does not show them
LOCK_EXISTS = re.compile(r"Unable to create '(?P<path>[^']+\.lock)': File exists")
CODE = ("cli", "flows", "services", "tasks", "training")


def git(root: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    has_identity = run(["git", "config", "user.email"], cwd=root, capture_output=True).returncode == 0
    identity = [] if has_identity else ["-c", "user.name=dpo", "-c", "user.email=dpo@localhost"]
    while True:
        process = run(
            ["git", *identity, *arguments],
            cwd=root,
            env=None if env is None else {**os.environ, **env},
            stdin=DEVNULL,
            capture_output=True,
            text=True,
        )
        lock = LOCK_EXISTS.search(process.stderr)
        if not (lock and clear_git_lock(Path(lock["path"]), ROOT)):  # the lock of a git that was killed
            break
    if process.returncode != 0:
        raise UserError(f"`git {' '.join(arguments)}` failed in {root}: {process.stderr.strip()}")
    return process.stdout.strip()


def snapshot(root: Path = ROOT) -> str:
    """A commit of the tracked files as they are now and of new code; HEAD if nothing changed since."""
    if resolve("HEAD", root) is None:
        raise UserError(f"{root} has no commit yet, and a run in its own worktree needs one. Run `git commit`.")
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        shutil.copy(root / git(root, "rev-parse", "--git-path", "index"), index)  # it knows which files are unchanged
        env = {"GIT_INDEX_FILE": str(index)}
        git(root, "add", "--update", env=env)
        if new := [name for name in untracked(root) if is_run_code(name)]:
            git(root, "add", "--force", "--", *new, env=env)
        tree = git(root, "write-tree", env=env)
    if tree == git(root, "rev-parse", "HEAD^{tree}"):
        return git(root, "rev-parse", "HEAD")
    return git(root, "commit-tree", tree, "-p", "HEAD", "-m", "The checkout as a run found it")


def is_run_code(name: str) -> bool:
    """Whether a run takes an untracked file along: code, recipes and dvc.lock. It reads data from the checkout."""
    return name == "dvc.lock" or (name.split("/")[0] in CODE and name.endswith((".py", ".yaml")))


def untracked(root: Path = ROOT) -> list[str]:
    return git(root, "ls-files", "--others", "--exclude-standard").splitlines()


def commit_run(root: Path, name: str) -> None:
    """Commit a worktree's params, code and dvc.lock as the branch runs/<name>."""
    git(root, "add", "--update")
    git(root, "add", "--force", "dvc.lock", *(str(path) for path in RUN_FILES if (root / path).exists()))
    if git(root, "status", "--porcelain", "--untracked-files=no"):
        git(root, "commit", "--quiet", "--no-verify", "--message", f"The run {name}")
    git(root, "update-ref", f"{BRANCHES}/{name}", "HEAD")


def commit_checkout_run(name: str) -> None:
    """Keep a run in the checkout as a commit of the checkout as it is, under a hidden ref."""
    git(ROOT, "update-ref", f"{CHECKOUT_RUNS}/{name}", snapshot())


def delete_refs(name: str) -> None:
    for refs in (BRANCHES, CHECKOUT_RUNS):
        git(ROOT, "update-ref", "-d", f"{refs}/{name}")


def find_commit(name: str) -> str | None:
    """The commit of a finished run."""
    return resolve(f"{BRANCHES}/{name}") or resolve(f"{CHECKOUT_RUNS}/{name}")


def get_commit(name: str) -> str:
    """The commit of a finished run by its name, or any other commit."""
    if commit := find_commit(name) or resolve(name):
        return commit
    runs = ", ".join(finished_runs()) or "none yet"
    raise UserError(f"There is no finished run '{name}'. Runs: {runs}; a commit serves as well.")


def resolve(revision: str, root: Path = ROOT) -> str | None:
    """The commit of a revision; None if there is no such commit, or no repository."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    return run(command, cwd=root, capture_output=True, text=True).stdout.strip() or None


def finished_runs() -> dict[str, str]:
    """The commit of each run that became one, by the run's name, newest first."""
    columns = "--format=%(refname) %(objectname)"
    refs = git(ROOT, "for-each-ref", "--sort=-committerdate", columns, BRANCHES, CHECKOUT_RUNS)
    pairs = (line.split() for line in refs.splitlines())
    return {ref.removeprefix(f"{BRANCHES}/").removeprefix(f"{CHECKOUT_RUNS}/"): commit for ref, commit in pairs}


def branches_and_tags() -> list[str]:
    """The refs of the checkout's owner: all but the branches of runs."""
    refs = git(ROOT, "for-each-ref", "--format=%(refname)", "refs/heads", "refs/tags").splitlines()
    return [ref for ref in refs if not ref.startswith(f"{BRANCHES}/")]


def tree_without_stage(commit: str, stage: str) -> str:
    """The tree of a commit whose dvc.lock does not name the outputs of a stage."""
    entries = {name: entry for name, entry in lock_of(commit).items() if name != stage}
    with tempfile.TemporaryDirectory() as folder:
        dvc_lock.write_lock(Path(folder), entries)
        env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        blob = git(ROOT, "hash-object", "-w", str(Path(folder) / "dvc.lock"))
        git(ROOT, "read-tree", commit, env=env)
        git(ROOT, "update-index", "--add", "--cacheinfo", f"100644,{blob},dvc.lock", env=env)
        return git(ROOT, "write-tree", env=env)


def lock_of(commit: str) -> dict[str, Entry]:
    """The entries of a commit's dvc.lock; empty if the commit has none."""
    command = ["git", "show", f"{commit}:dvc.lock"]
    return dvc_lock.parse_lock(run(command, cwd=ROOT, stdin=DEVNULL, capture_output=True, text=True).stdout)
