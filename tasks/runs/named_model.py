"""The model that a name on the command line means. Every command that takes a model finds it here.

The names of registered versions are those of tasks/tracking/model_names.py. An unregistered run, a base model, a folder
and a model of the hub have names too; a command that needs a registered version refuses them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.config.addresses import local_path
from tasks.config.cluster import load_cluster
from tasks.config.paths import MODEL, main_checkout
from tasks.system.files import read_json
from tasks.tracking.model_names import BASE_MODEL, FOLDER, HUB_MODEL, VERSION, read_name, registered_version
from tasks.tracking.registry import NotRegistered

HERE, RUN = "this model", "run"  # the export of this workspace; a run whose model is not registered


@dataclass(frozen=True)
class NamedModel:
    name: str  # as on the command line
    kind: str
    model: str = ""  # the registered one; of a base model, the one that was trained from it
    version: str = ""
    run: str = ""  # that made it
    folder: Path = Path()  # of a folder and of this workspace's export


def named_model(name: str | None) -> NamedModel:
    """What a name means now: an alias may have moved since the last call. Without a name: this workspace's export."""
    if name is None:
        return NamedModel(HERE, HERE, folder=MODEL)
    kind, rest = read_name(name)
    if kind == FOLDER:
        return NamedModel(name, kind, folder=local_path(name))
    if kind == HUB_MODEL or not rest:
        return NamedModel(name, kind)
    found = _of_version_or_run(rest)
    return replace(found, name=name, kind=BASE_MODEL if kind == BASE_MODEL else found.kind)


def _of_version_or_run(name: str) -> NamedModel:
    try:
        with registered_version(name) as (_, models, version):
            return NamedModel(name, VERSION, models.name, version.number, version.run)
    except NotRegistered:  # not where the registry cannot be reached: `dpo serve` keeps the version that it has
        if workspace_of(name):
            return NamedModel(name, RUN, run=name)
        raise


def manifest_of(found: NamedModel) -> dict[str, Any]:
    """Of the export: of a base model, that of the model which was trained from it."""
    if found.version:
        with registered_version(f"{found.model}/{found.version}") as (_, models, version):
            return dict(read_json(models.fetch(version, "model", "manifest.json")))
    return dict(read_json((workspace_of(found.run) or Path()) / MODEL / "manifest.json"))


def workspace_of(run: str) -> Path | None:
    """The folder with the small results of a run that has exported a model: its results, or its worktree."""
    folders = (
        main_checkout() / load_cluster().logging_dir / run / "results",
        main_checkout() / ".scratch" / "worktrees" / run,
    )
    return next((folder for folder in folders if (folder / MODEL / "manifest.json").exists()), None)
