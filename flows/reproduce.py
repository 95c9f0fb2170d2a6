"""A run again from its commit, and whether the same comes out: `python -m flows.reproduce NAME` (or `make reproduce`).

NAME is a run (`runs/<name>`) or any commit whose dvc.lock is committed. The run's code and params are checked out into
a worktree of their own, its raw data and base model are fetched from DVC, and every stage after them is computed anew:
neither DVC's run cache nor an old checkpoint helps.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from flows import ROOT, child
from flows.commits import commit_of, git
from flows.workspace import Workspace, share_cache
from tasks.configuration import read_yaml
from tasks.errors import UserError
from tasks.files import hash_files, read_json
from tasks.machines.lock import workspace_lock
from tasks.output import as_command
from tasks.place import RECIPE

GIVEN = ("watch", "source")  # fetched as it was: what lies behind its address may be gone by now
MACHINE = {
    "manifest.json",
    "manifest.sha256",
    "manifest.sig",
    "README.md",
}  # name the commit and the machine, besides what the other files are
EVALUATION = Path("data/metrics/evaluate.json")
MODEL = Path("data/model")


def reproduce(name: str) -> list[str]:
    """Run it again; what came out different. The worktree stays only where something did."""
    commit = commit_of(name)
    place = Workspace(ROOT / ".scratch" / "worktrees" / f"again-{name.replace('/', '-')}", f"again-{commit[:8]}")
    if place.root.exists():
        raise UserError(f"{place.root} is there already. Remove it with `git worktree remove --force {place.root}`.")
    git(ROOT, "worktree", "prune")
    git(ROOT, "worktree", "add", "--detach", str(place.root), commit)
    with workspace_lock(place.root):
        share_cache(place)
        _apart(place)
        if place.dvc("remote", "list").strip():
            place.dvc("pull", "--allow-missing")
        before = _outcome(place.root)
        if not before["outs"]:
            raise UserError(f"{name} ({commit[:12]}) has no dvc.lock: there is nothing to compare with.")
        for stage in [stage for stage in place.stages() if stage not in GIVEN]:
            _run(place, stage)
        different = compare(before, _outcome(place.root))
    if not different:
        git(ROOT, "worktree", "remove", "--force", str(place.root))
    return different


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not the same, in words."""
    found = [
        f"{path} (stage {stage}): {digest} before, {after['outs'].get((stage, path))} now"
        for (stage, path), digest in before["outs"].items()
        if after["outs"].get((stage, path)) != digest and path != str(MODEL)
    ]
    names = sorted(set(before["model"]) | set(after["model"]))
    found += [f"{MODEL / name} differs" for name in names if before["model"].get(name) != after["model"].get(name)]
    for name, value in before["metrics"].items():
        if after["metrics"].get(name) != value:
            found.append(f"{name}: {value} before, {after['metrics'].get(name)} now")
    return found


def _outcome(root: Path) -> dict[str, Any]:
    """What a run left: the hash of each out by stage, of each file of the export, and the metrics."""
    from tasks.release.gate import by_slash

    lock = yaml.safe_load((root / "dvc.lock").read_text()) if (root / "dvc.lock").exists() else {"stages": {}}
    outs = {
        (stage, out["path"]): out.get("md5") or out.get("hash")
        for stage, content in lock["stages"].items()
        for out in content.get("outs", [])
        if stage not in GIVEN
    }
    files = hash_files(root / MODEL) if (root / MODEL).exists() else {}
    metrics = by_slash(read_json(root / EVALUATION)) if (root / EVALUATION).exists() else {}
    return {"outs": outs, "metrics": metrics, "model": {n: d for n, d in files.items() if n not in MACHINE}}


def _run(place: Workspace, stage: str) -> None:
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", "--force", stage]
    code = child.run(command, place.root, place.environment(), print)
    if code:
        raise UserError(f"The stage {stage} failed in {place.root}; its output is above.")


def _apart(place: Workspace) -> None:
    """Checkpoints and shards in the worktree itself, so that none of the first run is found."""
    path = place.root / RECIPE
    recipe = read_yaml(path) if path.exists() else {}
    path.write_text(yaml.safe_dump({**recipe, "output_dir": str(place.root / ".scratch")}))


@as_command
def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1]:
        raise UserError("Say which run: `make reproduce RUN=name`.")
    different = reproduce(sys.argv[1])
    if different:
        sys.exit("error: " + "\n".join([f"{sys.argv[1]} did not come out the same:", *different]))
    print(f"{sys.argv[1]}: every artefact, every file of the export and every metric came out the same")


if __name__ == "__main__":
    main()
