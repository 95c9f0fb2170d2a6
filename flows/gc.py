"""`python -m flows.gc [--keep 10] [--yes]` (or `make gc [KEEP=10] [YES=1]`): what old runs hold and nobody needs.

Shows first, deletes with --yes. What a kept run's commit, any branch, any tag, any DVC experiment or the checkout names
stays in DVC's cache; kept runs keep their checkpoints and reference shards, aliases their versions.
"""

import argparse
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from flows import ROOT, commits, runs
from flows.commits import git
from flows.kept import Known, Run, choose, every_run, every_version, is_needed, unsent
from flows.open import OPENED
from flows.workspace import Workspace, bookkeeping, cache_folder, remove_worktree
from tasks.errors import UserError
from tasks.machines.lock import held, holder
from tasks.output import as_command
from tasks.params import load_cluster


@dataclass(frozen=True)
class Item:
    kind: str
    what: str
    size: int
    remove: Callable[[], None]


@dataclass(frozen=True)
class Found:
    every: list[Run]
    kept: dict[str, str]  # run: why
    items: list[Item]
    notes: list[str]


def look(newest: int) -> Found:
    """What would be deleted; nothing is."""
    cluster, every = load_cluster(ROOT), every_run()
    versions = every_version(cluster, every)
    kept = choose(every, versions, cluster, newest)
    staying = [run for run in every if run.name in kept]
    waiting = [run for run in every if run.name not in kept and unsent(run.folder)]
    unclear = [run for run in every if run.name not in kept and run.damaged]
    going = [run for run in every if run.name not in kept and run not in [*waiting, *unclear]]
    notes = [f"{run.name} stays: its figures are not in MLflow yet. `make sync` sends them" for run in waiting]
    notes += [f"{run.name} stays: its record is damaged. `make doctor FIX=1` sets it aside" for run in unclear]
    staying += [*waiting, *(run for run in unclear if run not in waiting)]
    items: list[Item] = []
    for known in (known for known in versions if not is_needed(known, staying)):
        try:
            items.append(_version(known))
        except UserError as error:
            notes.append(str(error).rstrip("."))
    items += [_run(run) for run in going]  # behind its versions: after a crash between both it still names the model
    items += [_worktree(path) for path in _stale_worktrees(staying, going)]
    items += [_folder("scratch", path) for path in _unused(ROOT / cluster.output_dir, staying)]
    inside = Path(cache_folder()).is_relative_to(ROOT)
    if inside:
        items += _cache(staying)
    else:
        notes.append(f"DVC's cache {cache_folder()} is outside of this project and may be others', too: left alone")
    return Found(every, kept, items, notes)


def _run(run: Run) -> Item:
    root = runs.WORKTREES / run.name

    def remove() -> None:
        for folder in (root, OPENED / run.name):
            if folder.exists():
                remove_worktree(folder)
        commits.forget(run.name)
        shutil.rmtree(run.folder, ignore_errors=True)

    size = sum(map(_size, (run.folder, root, OPENED / run.name)))
    state = run.record.now if run.record else "by hand"
    return Item("run", f"{run.name} ({state}, {run.since[:10]})", size, remove)


def _stale_worktrees(staying: list[Run], going: list[Run]) -> list[Path]:
    """Of runs that are finished, or of no run; those that went with their run are counted there."""
    needed = {run.name for run in staying if not run.finished} | {run.name for run in going}
    found = runs.WORKTREES.iterdir() if runs.WORKTREES.exists() else iter(())
    return [path for path in found if path.name not in needed and holder(path) is None]


def _worktree(path: Path) -> Item:
    return Item("worktree", path.name, _size(path), lambda: remove_worktree(path))


def _unused(output: Path, staying: list[Run]) -> Iterable[Path]:
    """Checkpoints and reference shards that no kept run has used (a finished training can be continued), and copies
    that were made for nodes without our disk: the next run makes its own."""
    for kind, users in (("train", staying), ("reference", staying), ("inputs", list[Run]())):
        used = {line for run in users for line in _addresses(run)}
        for folder in sorted((output / kind).glob("*/")):
            if f"{kind}/{folder.name}" not in used:
                yield folder


def _addresses(run: Run) -> list[str]:
    notes = run.folder / "addresses"
    return notes.read_text().split() if notes.exists() else []


def _folder(kind: str, path: Path) -> Item:
    def remove() -> None:
        shutil.rmtree(path)
        path.with_suffix(".lock").unlink(missing_ok=True)

    return Item(kind, f"{path.parent.name}/{path.name}", _size(path), remove)


def _version(known: Known) -> Item:
    what = f"{known.model.name} version {known.version.number}"
    return Item("registry", what, known.model.size(known.version), lambda: known.model.remove(known.version))


def _cache(staying: list[Run]) -> list[Item]:
    """One item: DVC decides what none of the commits names."""
    chain, count = _chain(staying)
    command = ["gc", "--workspace", "--all-experiments", "--rev", chain, "--num", str(count), "--force"]
    checkout = Workspace(ROOT, "")
    said = checkout.dvc(*command, "--dry", "--verbose")
    paths = [Path(path) for path in re.findall(r"(?m)Removing (/.+)$", said)]
    if not paths:
        return []
    size = sum(path.stat().st_size for path in paths if path.is_file())

    def remove() -> None:
        checkout.dvc(*command)

    return [Item("cache", f"{len(paths)} objects of DVC's cache", size, remove)]


def _chain(staying: list[Run]) -> tuple[str, int]:
    """All commits whose data stays as one line of history, which is how DVC takes more than one."""
    refs = git(ROOT, "for-each-ref", "--format=%(refname)", "refs/heads", "refs/tags").splitlines()
    wanted = ["HEAD", *(ref for ref in refs if not ref.startswith(f"{commits.BRANCHES}/"))]
    wanted += [run.commit for run in staying if run.commit]
    for run in staying:
        if run.record and not run.finished and run.record.own and Path(run.record.root).exists():
            wanted.append(commits.snapshot(Path(run.record.root)))
    trees = dict.fromkeys(git(ROOT, "rev-parse", f"{one}^{{tree}}") for one in wanted)
    tip = ""
    for tree in trees:
        tip = git(ROOT, "commit-tree", tree, *(["-p", tip] if tip else []), "-m", "kept by make gc")
    return tip, len(trees)


def delete(newest: int) -> None:
    """With nobody at work meanwhile: what a stage has just made is in the cache before any commit names it."""
    with held(ROOT), bookkeeping():
        found = look(newest)
        busy = [run.name for run in found.every if run.at_work]
        busy += [path.name for path in runs.WORKTREES.glob("*") if holder(path) and path.name not in busy]
        if busy:
            raise UserError(f"{', '.join(busy)} is at work: wait until it ends, and then run `make gc YES=1`.")
        _note(found)
        for item in found.items:
            item.remove()
            print(f"deleted  {item.what} ({_human(item.size)})", flush=True)
        shutil.rmtree(ROOT / ".scratch" / "locks", ignore_errors=True)
        git(ROOT, "worktree", "prune")


def show(found: Found) -> None:
    print("Kept:\n" + runs.table(found.kept.items(), ("run", "why")) if found.kept else "There is no run to keep.")
    _note(found)
    if not found.items:
        print("\nNothing is to delete.")
        return
    rows = [(item.kind, item.what, _human(item.size)) for item in found.items]
    print("\nTo delete:\n" + runs.table(rows, ("", "what", "size")))
    print(
        f"\n{_human(sum(item.size for item in found.items))} in all. Nothing is deleted yet: `make gc YES=1` does it."
    )


def _note(found: Found) -> None:
    for note in found.notes:
        print(f"note: {note}.", flush=True)


def _size(path: Path) -> int:
    """Bytes that go with a folder: what the cache holds, too, by a hard link, does not."""
    files = (
        [file.lstat() for file in path.rglob("*") if file.is_file() and not file.is_symlink()] if path.exists() else []
    )
    return sum(state.st_size for state in files if state.st_nlink == 1)


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@as_command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.gc", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=int, default=10, metavar="N", help="how many of the newest runs stay anyway")
    parser.add_argument("--yes", action="store_true", help="delete, and not only show")
    asked = parser.parse_args()
    os.environ["DPO_HOME"] = str(ROOT)
    if asked.keep < 0:
        raise UserError(f"KEEP is how many of the newest runs stay, and it is {asked.keep}. Give 0 or more.")
    delete(asked.keep) if asked.yes else show(look(asked.keep))


if __name__ == "__main__":
    main()
