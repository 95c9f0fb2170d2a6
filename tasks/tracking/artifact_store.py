"""The files of a registered version in MLflow's artifact store: on this machine, they can be linked and measured."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from tasks.errors import UserError


def is_local(root: str) -> bool:
    return root.startswith("file://")


def inside(root: str, place: str) -> Path:
    """A path below a run's artifacts on this machine, links followed."""
    folder = Path(unquote(urlparse(root).path)).resolve()
    path = (folder / place).resolve()
    if not path.is_relative_to(folder) or path == folder:
        raise UserError(f"{folder / place} leads out of {folder}, where MLflow keeps this run's files. Look at it.")
    return path


def link(path: Path, root: str, place: str) -> bool:
    """Link a file that is a link into DVC's cache into a local artifact store, which saves a copy of the weights.

    Nothing changes such a file in place: DVC protects it, and MLflow and our stages replace files by renaming.
    """
    if not is_local(root) or path.stat().st_nlink == 1:
        return False
    target = inside(root, f"{place}/{path.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.unlink(missing_ok=True)
        os.link(path, target)
    except OSError:  # another file system
        return False
    return True


def remove_partial_uploads(root: str, place: str) -> None:
    """A killed upload leaves MLflow's temporary file, as large as the weights, in a local artifact store."""
    if is_local(root):
        for what in ("model", "evaluation"):
            for path in inside(root, f"{what}/{place}").glob(".artifact.uploading.*"):
                path.unlink(missing_ok=True)


def freed_bytes(root: str, places: Iterable[str], suffixes: tuple[str, ...]) -> int:
    """Bytes that deleting the files with these suffixes frees on this machine: a link into DVC's cache frees none."""
    if not is_local(root):
        return 0
    files = [path for place in places for path in inside(root, place).rglob("*") if path.is_file()]
    states = [path.stat() for path in files if path.name.endswith(suffixes)]
    return sum(state.st_size for state in states if state.st_nlink == 1)


def delete(client: Any, root: str, places: Iterable[str]) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    if is_local(root):
        assert all(inside(root, place) for place in places)
    # Without the addresses MLflow resolves mlflow-artifacts: against a default of its own.
    store = get_artifact_repository(root, client.tracking_uri, client.tracking_uri)
    for place in places:
        store.delete_artifacts(place)


def delete_all(client: Any, run_id: str) -> None:
    """Every file of an MLflow run. Its metrics and params stay."""
    root = str(client.get_run(run_id).info.artifact_uri)
    delete(client, root, [artifact.path for artifact in client.list_artifacts(run_id)])
