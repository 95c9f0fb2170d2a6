"""Repeat a run from its commit and compare the results (`dpo reproduce`).

The run is a name (`runs/<name>`) or any commit whose dvc.lock is committed. Its code and params are checked out into a
worktree, its raw data and base model are fetched from DVC, and every later stage is computed again, without DVC's run
cache and without old checkpoints.
"""

from pathlib import Path
from typing import Any

import yaml

from tasks.config.cluster import OVERRIDES
from tasks.config.paths import METRICS, MODEL, ROOT
from tasks.config.strict import read_yaml
from tasks.errors import UserError
from tasks.runs import dvc, dvc_lock
from tasks.runs.commits import get_commit, git
from tasks.runs.records import WORKTREES
from tasks.runs.workspace import Workspace, check_out_results, ray_kept
from tasks.system import processes
from tasks.system.files import hash_files, read_json
from tasks.system.lock import workspace_lock
from tasks.tracking.journal import flatten_metrics

FETCHED = ("fingerprint", "source")  # not run again: the content behind their addresses may have changed
# Files of an export that name the commit and the machine; everything else in them follows from the other files.
MACHINE_FILES = {"manifest.json", "manifest.sha256", "manifest.sig", "README.md"}
EVALUATION = METRICS / "evaluate.json"


def reproduce(name: str) -> None:
    """Run again; UserError with the differences. The worktree is removed if there are none."""
    commit = get_commit(name)
    workspace = Workspace(WORKTREES / f"again-{name.replace('/', '-')}", f"again-{commit[:8]}")
    root = workspace.root
    if root.exists():
        raise UserError(f"{root} exists already. Remove it with `git worktree remove --force {root}`.")
    git(ROOT, "worktree", "prune")
    git(ROOT, "worktree", "add", "--detach", str(root), commit)
    with workspace_lock(root):
        check_out_results(workspace)
        _use_own_output_dir(root)
        if dvc.remotes(root):
            workspace.dvc("pull", "--allow-missing")
        before = _results(root)
        if not before:
            raise UserError(f"{name} ({commit[:12]}) has no dvc.lock, so there is nothing to compare with.")
        _run_again(workspace, [stage for stage in workspace.stages() if stage not in FETCHED])
        after = _results(root)
    differences = [
        f"{item}: {value} before, {after.get(item)} now" for item, value in before.items() if after.get(item) != value
    ]
    if differences:
        raise UserError("\n".join([f"{name} did not reproduce:", *differences]))
    git(ROOT, "worktree", "remove", "--force", str(root))
    print(f"{name}: every artifact, every file of the export and every metric is identical")


def _run_again(workspace: Workspace, stages: list[str]) -> None:
    with ray_kept(workspace, stages) as workspace:
        for stage in stages:
            if processes.run(dvc.repro_command(stage, force=True), workspace.root, workspace.environment(), print):
                raise UserError(f"The stage {stage} failed in {workspace.root}. Its output is above.")


def _results(root: Path) -> dict[str, Any]:
    """The hash of each out and of each file of the export, and the metrics, by name; empty without a dvc.lock."""
    results: dict[str, Any] = {}
    for stage, entry in dvc_lock.read_lock(root).items():
        if stage not in FETCHED:
            results |= {f"{path} (stage {stage})": md5 for path, md5 in dvc_lock.outs(entry).items()}
    if (root / MODEL).exists():
        files = {name: digest for name, digest in hash_files(root / MODEL).items() if name not in MACHINE_FILES}
        results |= {f"{MODEL / name}": digest for name, digest in files.items()}
        results[f"{MODEL} (stage export)"] = ", ".join(files)  # its own hash includes the machine's files
    if (root / EVALUATION).exists():
        results |= flatten_metrics(read_json(root / EVALUATION))
    return results


def _use_own_output_dir(root: Path) -> None:
    """Keep checkpoints and shards in the worktree itself, so that none of the first run is reused."""
    path = root / OVERRIDES
    overrides = read_yaml(path) if path.exists() else {}
    path.write_text(yaml.safe_dump({**overrides, "output_dir": str(root / ".scratch")}))
