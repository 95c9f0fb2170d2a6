"""Garbage collection (`dpo gc`): find what no kept run needs, show it, and delete it with --yes.

DVC's cache keeps what the checkout, any branch, any tag, any DVC experiment or the commit of a kept run names. Kept
runs keep their checkpoints and reference shards, aliases their versions.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tasks.config.cluster import load_cluster
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.runs import commits, dvc, records
from tasks.runs.commits import git
from tasks.runs.open_run import OPENED
from tasks.runs.retention import (
    RECENT,
    RegisteredVersion,
    Run,
    all_runs,
    artifacts_size,
    is_needed,
    reasons_to_keep,
    registered_versions,
)
from tasks.runs.workspace import remove_worktree, worktrees_lock
from tasks.system.disk import human, size_of
from tasks.system.lock import hold_workspace, workspace_holder


@dataclass(frozen=True)
class Item:
    kind: str
    name: str
    size: int
    delete: Callable[[], None]


@dataclass(frozen=True)
class Garbage:
    runs: list[Run]
    kept: dict[str, str]  # run: reason
    items: list[Item]
    notes: list[str]


def find_garbage(newest: int, forgotten: frozenset[str] = frozenset()) -> Garbage:
    """What would be deleted; deletes nothing. `forgotten` runs go, whatever keeps them; every refused model stays."""
    cluster, runs = load_cluster(ROOT), all_runs()
    versions = registered_versions(cluster, runs)
    reasons = reasons_to_keep(runs, versions, cluster, newest)
    reasons = {name: why for name, why in reasons.items() if name not in forgotten}
    kept, deleted, notes = _split(runs, reasons)
    items: list[Item] = []
    for registered in (registered for registered in versions if not is_needed(registered, kept)):
        try:
            items.append(_version(registered))
        except UserError as error:
            notes.append(str(error).rstrip("."))
    refused = [registered for registered in versions if registered.is_refused and is_needed(registered, kept)]
    refused = [] if forgotten else refused
    items += [_weights(registered) for registered in refused if registered.version.tags.get("weights") == "stored"]
    names = {registered.version.tags.get("run", "") for registered in refused}
    without_model = {name for name in names if reasons.get(name) == RECENT}
    reasons |= dict.fromkeys(without_model, f"{RECENT}, without its exported weights: the gate refused the model")
    items += [_run(run) for run in deleted]  # after its versions: after a crash in between it still names the model
    for path in _leftover_worktrees(kept, deleted):
        items.append(Item("worktree", path.name, _size(path), partial(remove_worktree, path)))
    items += [_scratch_folder(path) for path in _unused_folders(ROOT / cluster.output_dir, kept)]
    if dvc.cache_folder().is_relative_to(ROOT):
        items += _cache_objects(kept, without_model)
    else:
        notes.append(f"DVC's cache {dvc.cache_folder()} is outside of this project and may be shared: not touched")
    return Garbage(runs, reasons, items, notes)


def _split(runs: list[Run], reasons: dict[str, str]) -> tuple[list[Run], list[Run], list[str]]:
    """The runs to keep, the runs to delete, and notes about runs that stay although they have no reason to."""
    kept = [run for run in runs if run.name in reasons]
    deleted: list[Run] = []
    notes: list[str] = []
    for run in [run for run in runs if run.name not in reasons]:
        if unsent := run.has_unsent_metrics():
            notes.append(f"{run.name} stays: MLflow does not have its metrics yet. `dpo sync` sends them")
        if run.is_damaged:
            notes.append(f"{run.name} stays: its record is damaged. `dpo doctor --fix` moves it aside")
        (kept if unsent or run.is_damaged else deleted).append(run)
    return kept, deleted, notes


def _run(run: Run) -> Item:
    worktrees = [records.WORKTREES / run.name, OPENED / run.name]

    def delete() -> None:
        for folder in worktrees:
            if folder.exists():
                remove_worktree(folder)
        commits.delete_refs(run.name)
        shutil.rmtree(run.folder, ignore_errors=True)

    state = run.record.current_state if run.record else "by hand"
    return Item("run", f"{run.name} ({state}, {run.since[:10]})", sum(map(_size, (run.folder, *worktrees))), delete)


def _leftover_worktrees(kept: list[Run], deleted: list[Run]) -> list[Path]:
    """Worktrees of kept runs that are finished, or of no run. A deleted run's worktree is deleted with it."""
    excluded = {run.name for run in kept if not run.is_finished} | {run.name for run in deleted}
    worktrees = records.WORKTREES.iterdir() if records.WORKTREES.exists() else ()
    return [path for path in worktrees if path.name not in excluded and workspace_holder(path) is None]


def _unused_folders(output: Path, kept: list[Run]) -> Iterable[Path]:
    """Checkpoints and reference shards that no kept run used (a finished training can be continued), and copies of
    inputs for nodes without our disk: the next run copies them again."""
    used = {line for run in kept for line in _addresses(run)}
    for kind in ("sample", "sft", "train", "reference", "inputs"):
        for folder in sorted((output / kind).glob("*/")):
            if kind == "inputs" or f"{kind}/{folder.name}" not in used:
                yield folder


def _addresses(run: Run) -> list[str]:
    path = run.folder / "addresses"
    return path.read_text().split() if path.exists() else []


def _scratch_folder(path: Path) -> Item:
    def delete() -> None:
        shutil.rmtree(path)
        path.with_suffix(".lock").unlink(missing_ok=True)

    return Item("scratch", f"{path.parent.name}/{path.name}", _size(path), delete)


def _version(registered: RegisteredVersion) -> Item:
    model, version = registered.model, registered.version
    return Item(
        "registry", f"{model.name} version {version.number}", model.size(version), lambda: model.remove(version)
    )


def _weights(registered: RegisteredVersion) -> Item:
    model, version = registered.model, registered.version
    name = f"weights of {model.name} version {version.number}, which the gate refused"
    return Item("registry", name, model.size(version, weights=True), lambda: model.remove_weights(version))


def _cache_objects(kept: list[Run], without_model: set[str]) -> list[Item]:
    """One item for all cache objects that no commit to keep names, as DVC finds them."""
    tip, count = _chain_of_commits(kept, without_model)
    paths = dvc.collect_garbage(tip, count, dry_run=True)
    if not paths:
        return []
    size = sum(path.stat().st_size for path in paths if path.is_file())

    def delete() -> None:
        dvc.collect_garbage(tip, count, dry_run=False)

    return [Item("cache", f"{len(paths)} objects of DVC's cache", size, delete)]


def _chain_of_commits(kept: list[Run], without_model: set[str]) -> tuple[str, int]:
    """All commits whose data stays, copied into one line of history: DVC takes several commits only in that form."""
    refs = git(ROOT, "for-each-ref", "--format=%(refname)", "refs/heads", "refs/tags").splitlines()
    commits_to_keep = ["HEAD", *(ref for ref in refs if not ref.startswith(f"{commits.BRANCHES}/"))]
    commits_to_keep += [run.commit for run in kept if run.commit and run.name not in without_model]
    for run in kept:
        if run.record and not run.is_finished and run.record.has_worktree and Path(run.record.root).exists():
            commits_to_keep.append(commits.snapshot(Path(run.record.root)))
    trees = dict.fromkeys(git(ROOT, "rev-parse", f"{commit}^{{tree}}") for commit in commits_to_keep)
    trees |= {
        commits.tree_without_stage(run.commit, "export"): None
        for run in kept
        if run.commit and run.name in without_model
    }
    tip = ""
    for tree in trees:
        tip = git(ROOT, "commit-tree", tree, *(["-p", tip] if tip else []), "-m", "kept by dpo gc")
    return tip, len(trees)


def delete_garbage(newest: int, forgotten: frozenset[str] = frozenset()) -> None:
    """Delete while no run is active: a running stage's results are in the cache before any commit names them."""
    with hold_workspace(ROOT), worktrees_lock():
        garbage = find_garbage(newest, forgotten)
        active = [run.name for run in garbage.runs if run.is_running]
        active += [
            path.name for path in records.WORKTREES.glob("*") if workspace_holder(path) and path.name not in active
        ]
        if active:
            raise UserError(f"These runs are active: {', '.join(active)}. Run `dpo gc --yes` when they have ended.")
        _show_notes(garbage)
        for item in garbage.items:
            item.delete()
            print(f"deleted  {item.name} ({human(item.size)})", flush=True)
        shutil.rmtree(ROOT / ".scratch" / "locks", ignore_errors=True)
        git(ROOT, "worktree", "prune")


def show(garbage: Garbage) -> None:
    sizes = {run.name: artifacts_size(commits.read_file(run.commit or "", "dvc.lock")) for run in garbage.runs}
    rows = [(name, human(sizes[name]), why) for name, why in garbage.kept.items()]
    kept = records.text_table(rows, ("run", "artifacts", "why"))
    print(f"Kept:\n{kept}" if garbage.kept else "There is no run to keep.")
    places = {"MLflow": ROOT / ".mlflow", "checkpoints and logs": ROOT / ".scratch"}  # without what the cache has too
    sizes_on_disk = {"DVC's cache": size_of(dvc.cache_folder()), **{name: _size(path) for name, path in places.items()}}
    print("Disk: " + ", ".join(f"{human(size)} in {name}" for name, size in sizes_on_disk.items()))
    _show_notes(garbage)
    if not garbage.items:
        print("\nNothing to delete.")
        return
    items = [(item.kind, item.name, human(item.size)) for item in garbage.items]
    print("\nTo delete:\n" + records.text_table(items, ("", "what", "size")))
    total = human(sum(item.size for item in garbage.items))
    print(f"\n{total} in total. Nothing is deleted yet: `dpo gc --yes` deletes it.")


def _show_notes(garbage: Garbage) -> None:
    for note in garbage.notes:
        print(f"note: {note}.", flush=True)


def _size(path: Path) -> int:
    """Bytes that deleting a folder frees: files that the cache has too, as a hard link, do not count."""
    files = [file.lstat() for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return sum(state.st_size for state in files if state.st_nlink == 1)


def collect(keep: int, yes: bool) -> None:
    os.environ["DPO_HOME"] = str(ROOT)
    if keep < 0:
        raise UserError(f"--keep {keep}: the number of newest runs to keep must be 0 or more.")
    if yes:
        delete_garbage(keep)
    else:
        show(find_garbage(keep))
