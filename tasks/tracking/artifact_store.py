"""The files of a registered version in MLflow's artifact store: on this machine, they can be linked and measured."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from tasks.errors import UserError


def is_local(root: str) -> bool:
    return root.startswith("file://")


def inside(root: str, path: str) -> Path:
    """A path below a run's artifacts on this machine, links resolved."""
    folder = Path(unquote(urlparse(root).path)).resolve()
    resolved = (folder / path).resolve()
    if not resolved.is_relative_to(folder) or resolved == folder:
        raise UserError(f"{folder / path} leads out of {folder}, where MLflow keeps this run's files. Look at it.")
    return resolved


def link(path: Path, root: str, folder: str) -> bool:
    """Add a hard link to a local artifact store, for a file that is a hard link into DVC's cache. Saves a copy.

    Nothing changes such a file in place: DVC protects it, and MLflow and our stages replace files by renaming.
    """
    if not is_local(root) or path.stat().st_nlink == 1:
        return False
    target = inside(root, f"{folder}/{path.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.unlink(missing_ok=True)
        os.link(path, target)
    except OSError:  # another file system
        return False
    return True


def remove_partial_uploads(root: str, folders: Iterable[str]) -> None:
    """A killed upload leaves MLflow's temporary file, as large as the weights, in a local artifact store."""
    if is_local(root):
        for folder in folders:
            for path in inside(root, folder).glob(".artifact.uploading.*"):
                path.unlink(missing_ok=True)


def freed_bytes(root: str, folders: Iterable[str], suffixes: tuple[str, ...]) -> int:
    """Bytes that deleting the files with these suffixes frees on this machine: a link into DVC's cache frees none."""
    if not is_local(root):
        return 0
    files = [path for folder in folders for path in inside(root, folder).rglob("*") if path.is_file()]
    states = [path.stat() for path in files if path.name.endswith(suffixes)]
    return sum(state.st_size for state in states if state.st_nlink == 1)


def delete(client: Any, root: str, paths: Sequence[str]) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    if is_local(root):
        for path in paths:
            inside(root, path)  # UserError for a path that leads out of the run's artifacts
    # Without the addresses MLflow resolves mlflow-artifacts: against a default of its own.
    store = get_artifact_repository(root, client.tracking_uri, client.tracking_uri)
    for path in paths:
        store.delete_artifacts(path)


def delete_all(client: Any, run_id: str) -> None:
    """Every file of an MLflow run. Its metrics and params stay."""
    root = str(client.get_run(run_id).info.artifact_uri)
    delete(client, root, [artifact.path for artifact in client.list_artifacts(run_id)])
