"""Garbage collection (`dpo gc`): find what no kept run needs, show it, and delete it with --yes.

DVC's cache keeps what the checkout, any branch, any tag, any DVC experiment or the commit of a kept run names. Kept
runs keep their checkpoints and reference shards, aliases their versions.

DVC finds the objects to delete. `dvc gc --all-branches`, after the branches of runs are deleted, is not enough: it has
no preview while the branches are there, does not see runs in the checkout, which have no branch, and cannot keep a run
without its exported weights (docs/decisions/2026-11-19-libraries.md).
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tasks.checkout import kept_checkout
from tasks.config.cluster import load_cluster
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.runs import commits, dvc, records
from tasks.runs.commits import git
from tasks.runs.dvc_lock import artifacts_size
from tasks.runs.open_run import OPENED
from tasks.runs.retention import (
    RECENT,
    WITHOUT_WEIGHTS,
    RegisteredVersion,
    StoredRun,
    all_runs,
    is_needed,
    reasons_to_keep,
    registered_versions,
)
from tasks.runs.workspace import remove_worktree, worktrees_lock
from tasks.system.disk import human, size_of
from tasks.system.lock import hold_workspace, workspace_holder
from tasks.tracking.journal_reader import unsent


@dataclass(frozen=True)
class Item:
    kind: str
    name: str
    size: int
    delete: Callable[[], object]


@dataclass(frozen=True)
class Garbage:
    runs: list[StoredRun]
    kept: dict[str, str]  # run: reason
    items: list[Item]
    notes: list[str]


def find_garbage(newest: int, forgotten: frozenset[str] = frozenset()) -> Garbage:
    """What would be deleted; deletes nothing. If runs are to be forgotten, these go and everything else stays."""
    cluster, runs = load_cluster(ROOT), all_runs()
    versions = registered_versions(cluster, runs)
    if forgotten:
        reasons = {run.name: RECENT for run in runs if run.name not in forgotten}
    else:
        reasons = reasons_to_keep(runs, versions, cluster, newest)
    kept, deleted, notes = _split(runs, reasons)
    items: list[Item] = []
    for registered in versions:
        try:
            if not is_needed(registered, kept):
                items.append(_version(registered))
            elif registered.has_refused_weights and not forgotten:
                items.append(_weights(registered))
        except UserError as error:
            notes.append(str(error).rstrip("."))
    items += [_run(run) for run in deleted]  # after its versions: after a crash in between it still names the model
    for path in _leftover_worktrees(kept, deleted):
        items.append(Item("worktree", path.name, _size(path), partial(remove_worktree, path)))
    items += [_scratch_folder(path) for path in _unused_folders(ROOT / cluster.output_dir, kept)]
    if dvc.cache_folder().is_relative_to(ROOT):
        items += _cache_objects(kept, reasons)
    else:
        notes.append(f"DVC's cache {dvc.cache_folder()} is outside of this project and may be shared: not touched")
    return Garbage(runs, reasons, items, notes)


def _split(runs: list[StoredRun], reasons: dict[str, str]) -> tuple[list[StoredRun], list[StoredRun], list[str]]:
    """The runs to keep, the runs to delete, and notes about runs that stay although they have no reason to."""
    kept = [run for run in runs if run.name in reasons]
    deleted: list[StoredRun] = []
    notes: list[str] = []
    for run in [run for run in runs if run.name not in reasons]:
        if has_unsent := unsent(run.folder):
            notes.append(f"{run.name} stays: MLflow does not have its metrics yet. `dpo sync` sends them")
        if run.is_damaged:
            notes.append(f"{run.name} stays: its record is damaged. `dpo doctor --fix` moves it aside")
        (kept if has_unsent or run.is_damaged else deleted).append(run)
    return kept, deleted, notes


def _run(run: StoredRun) -> Item:
    worktrees = [records.WORKTREES / run.name, OPENED / run.name]

    def delete() -> None:
        for folder in worktrees:
            if folder.exists():
                remove_worktree(folder)
        commits.delete_refs(run.name)
        shutil.rmtree(run.folder, ignore_errors=True)

    state = run.record.current_state if run.record else "by hand"
    return Item("run", f"{run.name} ({state}, {run.since[:10]})", sum(map(_size, (run.folder, *worktrees))), delete)


def _leftover_worktrees(kept: list[StoredRun], deleted: list[StoredRun]) -> list[Path]:
    """Worktrees of kept runs that are finished, or of no run. A deleted run's worktree is deleted with it."""
    excluded = {run.name for run in kept if not run.is_finished} | {run.name for run in deleted}
    worktrees = (path for path in records.WORKTREES.glob("*") if path.name not in excluded)
    return [path for path in worktrees if workspace_holder(path) is None]


def _unused_folders(output: Path, kept: list[StoredRun]) -> Iterable[Path]:
    """Checkpoints and reference shards that no kept run used (a finished training can be continued), and copies of
    inputs for nodes without our disk: the next run copies them again."""
    notes = [run.folder / "addresses" for run in kept]
    used = {line for path in notes if path.exists() for line in path.read_text().split()}
    for kind in ("sample", "sft", "train", "reference", "inputs"):
        for folder in sorted((output / kind).glob("*/")):
            if kind == "inputs" or f"{kind}/{folder.name}" not in used:
                yield folder


def _scratch_folder(path: Path) -> Item:
    def delete() -> None:
        shutil.rmtree(path)
        path.with_suffix(".lock").unlink(missing_ok=True)

    return Item("scratch", f"{path.parent.name}/{path.name}", _size(path), delete)


def _version(registered: RegisteredVersion) -> Item:
    model, version = registered.model, registered.version
    name = f"{model.name} version {version.number}"
    return Item("registry", name, model.size(version), partial(model.remove, version))


def _weights(registered: RegisteredVersion) -> Item:
    model, version = registered.model, registered.version
    name = f"weights of {model.name} version {version.number}, which the gate refused"
    return Item("registry", name, model.size(version, weights=True), partial(model.remove_weights, version))


def _cache_objects(kept: list[StoredRun], reasons: Mapping[str, str]) -> list[Item]:
    """One item for all cache objects that no commit to keep names, as DVC finds them."""
    tip, count = _chain_of_commits(kept, reasons)
    paths = dvc.collect_garbage(tip, count, dry_run=True)
    if not paths:
        return []
    size = sum(path.stat().st_size for path in paths if path.is_file())
    return [Item("cache", f"{len(paths)} objects of DVC's cache", size, partial(dvc.collect_garbage, tip, count))]


def _chain_of_commits(kept: list[StoredRun], reasons: Mapping[str, str]) -> tuple[str, int]:
    """All commits whose data stays, copied into one line of history: DVC takes several commits only in that form."""
    to_keep = ["HEAD", *commits.branches_and_tags()]
    for run in kept:
        if run.commit and reasons.get(run.name) == WITHOUT_WEIGHTS:
            to_keep.append(commits.tree_without_stage(run.commit, "export"))
        elif run.commit:
            to_keep.append(run.commit)
        if run.record and not run.is_finished and run.record.has_worktree and Path(run.record.root).exists():
            to_keep.append(commits.snapshot(Path(run.record.root)))
    tip, trees = "", {git(ROOT, "rev-parse", f"{commit}^{{tree}}") for commit in to_keep}
    for tree in trees:
        tip = git(ROOT, "commit-tree", tree, *(["-p", tip] if tip else []), "-m", "kept by dpo gc")
    return tip, len(trees)


def delete_garbage(newest: int = 0, forgotten: frozenset[str] = frozenset()) -> None:
    """Delete while no run is active: a running stage's results are in the cache before any commit names them."""
    with hold_workspace(ROOT), worktrees_lock():
        garbage = find_garbage(newest, forgotten)
        active = {run.name for run in garbage.runs if run.is_running}
        active |= {path.name for path in records.WORKTREES.glob("*") if workspace_holder(path)}
        if active:
            names = ", ".join(sorted(active))
            raise UserError(f"These runs are active: {names}. Run `dpo gc --yes` when they have ended.")
        _show_notes(garbage)
        for item in garbage.items:
            item.delete()
            print(f"deleted  {item.name} ({human(item.size)})", flush=True)
        shutil.rmtree(ROOT / ".scratch" / "locks", ignore_errors=True)
        git(ROOT, "worktree", "prune")


def show(garbage: Garbage) -> None:
    kept = [run for run in garbage.runs if run.name in garbage.kept]
    rows = [(run.name, human(artifacts_size(run.lock())), garbage.kept[run.name]) for run in kept]
    table = records.text_table(rows, ("run", "artifacts", "why"))
    print(f"Kept:\n{table}" if kept else "There is no run to keep.")
    cache, mlflow, scratch = size_of(dvc.cache_folder()), _size(ROOT / ".mlflow"), _size(ROOT / ".scratch")
    print(f"Disk: {human(cache)} in DVC's cache, {human(mlflow)} in MLflow, {human(scratch)} in checkpoints and logs")
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


@kept_checkout(ROOT)
def collect(keep: int, yes: bool) -> None:
    if keep < 0:
        raise UserError(f"--keep {keep}: the number of newest runs to keep must be 0 or more.")
    if yes:
        delete_garbage(keep)
    else:
        show(find_garbage(keep))
