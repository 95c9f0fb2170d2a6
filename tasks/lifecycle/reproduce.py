"""Repeat a run from its commit and compare the results (`dpo reproduce`).

The run is a name (`runs/<name>`) or any commit whose dvc.lock is committed. Its code and params are checked out into a
worktree, its raw data and base model are fetched from DVC, and every later stage is computed again, without DVC's run
cache and without old checkpoints.
"""

from pathlib import Path
from typing import Any

import yaml

from tasks.config.cluster import RECIPE
from tasks.config.paths import ROOT
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

FETCHED = ("watch", "source")  # not run again: the content behind their addresses may have changed
# Files of an export that name the commit and the machine; everything else in them follows from the other files.
MACHINE_FILES = {"manifest.json", "manifest.sha256", "manifest.sig", "README.md"}
EVALUATION = Path("data/metrics/evaluate.json")
MODEL = Path("data/model")


def reproduce(name: str) -> list[str]:
    """Run again and return the differences. The worktree is removed if there are none."""
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
        if not before["outs"]:
            raise UserError(f"{name} ({commit[:12]}) has no dvc.lock, so there is nothing to compare with.")
        _run_again(workspace, [stage for stage in workspace.stages() if stage not in FETCHED])
        differences = compare(before, _results(root))
    if not differences:
        git(ROOT, "worktree", "remove", "--force", str(root))
    return differences


def _run_again(workspace: Workspace, stages: list[str]) -> None:
    with ray_kept(workspace, stages) as workspace:
        for stage in stages:
            if processes.run(dvc.repro_command(stage, force=True), workspace.root, workspace.environment(), print):
                raise UserError(f"The stage {stage} failed in {workspace.root}. Its output is above.")


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The differences, in words."""
    differences = [
        f"{path} (stage {stage}): {md5} before, {after['outs'].get((stage, path))} now"
        for (stage, path), md5 in before["outs"].items()
        if after["outs"].get((stage, path)) != md5 and path != str(MODEL)
    ]
    names = sorted(set(before["model"]) | set(after["model"]))
    differences += [
        f"{MODEL / name} differs" for name in names if before["model"].get(name) != after["model"].get(name)
    ]
    for name, value in before["metrics"].items():
        if after["metrics"].get(name) != value:
            differences.append(f"{name}: {value} before, {after['metrics'].get(name)} now")
    return differences


def _results(root: Path) -> dict[str, Any]:
    """The hash of each out by stage, the hash of each file of the export, and the metrics."""
    lock = {stage: entry for stage, entry in dvc_lock.read_lock(root).items() if stage not in FETCHED}
    outs = {(stage, path): md5 for stage, entry in lock.items() for path, md5 in dvc_lock.outs(entry).items()}
    files = hash_files(root / MODEL) if (root / MODEL).exists() else {}
    metrics = flatten_metrics(read_json(root / EVALUATION)) if (root / EVALUATION).exists() else {}
    return {"outs": outs, "metrics": metrics, "model": {n: h for n, h in files.items() if n not in MACHINE_FILES}}


def _use_own_output_dir(root: Path) -> None:
    """Keep checkpoints and shards in the worktree itself, so that none of the first run is reused."""
    path = root / RECIPE
    recipe = read_yaml(path) if path.exists() else {}
    path.write_text(yaml.safe_dump({**recipe, "output_dir": str(root / ".scratch")}))


def show_reproduction(name: str) -> None:
    if differences := reproduce(name):
        raise UserError("\n".join([f"{name} did not reproduce:", *differences]))
    print(f"{name}: every artifact, every file of the export and every metric is identical")
