"""Check out the files of a run (`dpo open`): a worktree of its commit with its artifacts from DVC's cache or remote."""

from contextlib import suppress
from pathlib import Path

from tasks.config.paths import MODEL, ROOT
from tasks.errors import UserError
from tasks.runs import dvc, records
from tasks.runs.commits import find_commit, get_commit, git, resolve
from tasks.runs.dvc_lock import outs, read_lock
from tasks.runs.workspace import Workspace, check_out_results
from tasks.system.files import sha256
from tasks.tracking.model_names import plain_name, registered_version
from tasks.tracking.registry import Registry, Version

OPENED = ROOT / ".scratch" / "open"


def open_run(name: str, folder: Path | None = None) -> Path:
    """The folder with the run's files. A run without a commit has no other than its worktree, if that stays for now."""
    name = plain_name(name)
    name = name if records.read_record(name) or find_commit(name) else _run_of_version(name)
    record = records.read_record(name)
    if record and find_commit(name) is None and record.has_worktree and Path(record.root).exists():
        _require_lasting(record, folder)
        return Path(record.root)
    target = folder.resolve() if folder else OPENED / name.replace("/", "-")
    commit = get_commit(name)
    if target.exists() and any(target.iterdir()):
        if resolve("HEAD", target) == commit:
            return target
        raise UserError(f"{target} exists and is not empty. Name another folder: `dpo open {name} FOLDER`.")
    git(ROOT, "worktree", "prune")
    git(ROOT, "worktree", "add", "--detach", str(target), commit)
    workspace = Workspace(target, name)
    check_out_results(workspace)
    _fetch_missing(workspace, name)
    return target


def _require_lasting(record: records.RunRecord, folder: Path | None) -> None:
    """UserError if the worktree of an unfinished run goes away with the run, or is not the folder to create."""
    state, retry = record.current_state, f"`dpo open {record.name}{f' {folder}' if folder else ''}`"
    if state == records.RUNNING:
        raise UserError(
            f"The run {record.name} is still at work in {record.root}, which is removed when it ends. Its stages must "
            f"be done first; then {retry} checks out its files."
        )
    if folder:
        raise UserError(
            f"The run {record.name} ended ({state}) before its stages were done, so its files are in its worktree "
            f"alone: {record.root}. `dpo resume {record.name}` finishes it; then {retry} checks them out."
        )


def _run_of_version(name: str) -> str:
    """The run that made a registered version, such as `champion`; any other name stays."""
    with suppress(UserError), registered_version(name) as (_, _, version):
        return version.tags.get("run") or name
    return name


def _fetch_missing(workspace: Workspace, name: str) -> None:
    missing = _missing(workspace.root)
    if missing and dvc.remotes(workspace.root):
        print("Fetching artifacts that the cache does not have from DVC's remote", flush=True)
        workspace.dvc("pull", "--allow-missing")
        missing = _missing(workspace.root)
    if missing:
        print(f"No longer in DVC's cache: {', '.join(missing)}. `dpo reproduce {name}` computes them again.")


def _missing(root: Path) -> list[str]:
    paths = [path for entry in read_lock(root).values() for path in outs(entry)]
    return [path for path in paths if not (root / path).exists()]


def weights_of(models: Registry, version: Version) -> Path:
    """The folder with a version's weights. Where the registry does not store them, the files of its run are opened."""
    folder = models.fetch(version, "model")
    if any(folder.glob("*.safetensors")):
        return folder
    run = version.tags.get("run", "")
    if run and find_commit(run):
        opened = open_run(run) / MODEL
        if any(opened.glob("*.safetensors")) and sha256(opened / "manifest.json") == models.digest(version):
            return opened
    raise UserError(
        f"the weights of version {version.number} of {models.name} are neither in the registry nor in DVC's cache. "
        f"`dpo open {run}`, then `dvc repro export` in that folder, computes them again."
    )
