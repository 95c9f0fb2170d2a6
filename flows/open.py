"""A run's files back: `python -m flows.open NAME [FOLDER]` (or `make open RUN=name [TO=folder]`).

A worktree of the run's commit with its artefacts from DVC's cache, or from its remote where the cache has them no more.
"""

import sys
from pathlib import Path

from flows import ROOT, runs
from flows.commits import commit_of, find, git
from flows.workspace import Workspace, share_cache
from tasks.errors import UserError
from tasks.output import as_command

OPENED = ROOT / ".scratch" / "open"


def open_run(name: str, folder: Path | None = None) -> Path:
    """Where the run's files are. One that did not finish still has its worktree."""
    record = runs.find(name)
    if record and find(name) is None and record.own and Path(record.root).exists():
        return Path(record.root)
    target = folder.resolve() if folder else OPENED / name.replace("/", "-")
    commit = commit_of(name)
    if target.exists() and any(target.iterdir()):
        if _is_at(target, commit):
            return target
        raise UserError(
            f"{target} is there already and is not empty. Name another folder: `make open RUN={name} TO=...`."
        )
    git(ROOT, "worktree", "prune")
    git(ROOT, "worktree", "add", "--detach", str(target), commit)
    place = Workspace(target, name)
    share_cache(place)
    _fetch(place, name)
    return target


def _is_at(folder: Path, commit: str) -> bool:
    try:
        return git(folder, "rev-parse", "HEAD") == commit
    except UserError:
        return False


def _fetch(place: Workspace, name: str) -> None:
    missing = _missing(place)
    if missing and place.dvc("remote", "list").strip():
        print("Fetching from DVC's remote what the cache does not have", flush=True)
        place.dvc("pull", "--allow-missing")
        missing = _missing(place)
    if missing:
        print(f"Not in DVC's cache any more: {', '.join(missing)}. `make reproduce RUN={name}` computes them anew.")


def _missing(place: Workspace) -> list[str]:
    from flows.inputs import lock_of, outs

    every = [path for entry in lock_of(place.root).values() for path in outs(entry)]
    return [path for path in every if not (place.root / path).exists()]


@as_command
def main() -> None:
    if len(sys.argv) < 2 or not sys.argv[1]:
        raise UserError("Say which run: `make open RUN=name`, and where to if you like: TO=folder.")
    target = Path(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2] else None
    folder = open_run(sys.argv[1], target)
    print(f"{sys.argv[1]} is in {folder}\n`git worktree remove --force {folder}` closes it again.")


if __name__ == "__main__":
    main()
