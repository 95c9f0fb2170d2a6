"""Versions and aliases in MLflow's registry; with record.py the only code that talks to MLflow.

Aliases move together: what they shall become is written down first (one tag, one call), and who comes next finishes
what a crash left half done.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from tasks.errors import UserError
from tasks.files import home, read_json
from tasks.params import Cluster
from tasks.redact import redact
from tasks.tracking.forward import PATIENCE
from tasks.tracking.journal import absolute

LARGEST_UPLOAD = 2**30  # weights above it stay where they are, named by hash
MOVING = "moving"
PREVIOUS, CHALLENGER = "previous", "challenger"


@dataclass(frozen=True)
class Moves:
    """What aliases (None: no such alias) and tags of versions shall become."""

    aliases: Mapping[str, str | None]
    tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Version:
    number: str
    run_id: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Registry:
    """The versions of one model."""

    client: Any
    name: str

    def versions(self) -> list[Version]:
        found = self.client.search_model_versions(f"name = '{self.name}'")
        return sorted(map(_version, found), key=lambda version: int(version.number))

    def version(self, number: str) -> Version | None:
        return next((version for version in self.versions() if version.number == str(number)), None)

    def with_manifest(self, digest: str) -> Version | None:
        return next((version for version in self.versions() if version.tags.get("manifest_sha256") == digest), None)

    def at(self, alias: str) -> Version | None:
        found = self.client.get_registered_model(self.name).aliases.get(alias)
        return None if found is None else self.version(found)

    def of_run(self, name: str) -> Version | None:
        """The newest version that a pipeline run made."""
        return next((version for version in reversed(self.versions()) if version.tags.get("run") == name), None)

    def add(self, run_id: str, folder: Path, evaluation: list[Path], tags: dict[str, str]) -> Version:
        """A new version: the export and its evaluation as artifacts, each under the manifest's hash."""
        place = tags["manifest_sha256"][:12]
        small = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= LARGEST_UPLOAD
        for path in sorted(folder.iterdir()):
            if small or path.suffix not in (".safetensors", ".gguf"):
                self.client.log_artifact(run_id, str(path), f"model/{place}")
        for path in evaluation:
            self.client.log_artifact(run_id, str(path), f"evaluation/{place}")
        tags = {**tags, "weights": "stored" if small else f"too large to store: `make open RUN={tags['run']}`"}
        source = f"{self.client.get_run(run_id).info.artifact_uri}/model/{place}"
        return _version(self.client.create_model_version(self.name, source, run_id, tags=tags))

    def fetch(self, version: Version, what: str, file: str = "") -> Path:
        """`model` or `evaluation` of a version, or one file of it: where it lies, or a copy of what lies elsewhere."""
        place = f"{what}/{version.tags['manifest_sha256'][:12]}/{file}".rstrip("/")
        root = self.client.get_run(version.run_id).info.artifact_uri
        if root.startswith("file://"):
            return Path(unquote(urlparse(root).path)) / place
        copies = home() / ".scratch" / "registry" / self.name / version.number
        copies.mkdir(parents=True, exist_ok=True)
        return Path(self.client.download_artifacts(version.run_id, place, str(copies)))

    def aliases(self) -> dict[str, str]:
        """The version at each alias."""
        return {alias: str(number) for alias, number in self.client.get_registered_model(self.name).aliases.items()}

    def size(self, version: Version) -> int:
        """Bytes of a version's artifacts, where they lie on this machine."""
        root = self.client.get_run(version.run_id).info.artifact_uri
        if not root.startswith("file://"):
            return 0
        folders = [Path(unquote(urlparse(root).path)) / place for place in _places(version)]
        return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())

    def remove(self, version: Version) -> None:
        """The version and its artifacts; the run that made it stays, with all its figures."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        self.client.delete_model_version(self.name, version.number)
        store = get_artifact_repository(self.client.get_run(version.run_id).info.artifact_uri)
        for place in _places(version):
            store.delete_artifacts(place)

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self.client.set_model_version_tag(self.name, version.number, name, value)

    def move(self, moves: Moves) -> None:
        content = json.dumps({"aliases": moves.aliases, "tags": moves.tags})
        self.client.set_registered_model_tag(self.name, MOVING, content)
        self._apply(moves)

    def settle(self) -> bool:
        """Finish what a crash left half done; whether there was anything."""
        content = self.client.get_registered_model(self.name).tags.get(MOVING)
        if content:
            self._apply(Moves(**json.loads(content)))
        return bool(content)

    def _apply(self, moves: Moves) -> None:
        now = self.client.get_registered_model(self.name).aliases
        for version, tags in moves.tags.items():
            for name, value in tags.items():
                self.client.set_model_version_tag(self.name, version, name, value)
        for alias, number in moves.aliases.items():
            if number is not None:
                self.client.set_registered_model_alias(self.name, alias, number)
            elif alias in now:
                self.client.delete_registered_model_alias(self.name, alias)
        self.client.delete_registered_model_tag(self.name, MOVING)


@contextmanager
def registry(cluster: Cluster, name: str, run: Path | None = None) -> Iterator[Registry]:
    """The registered model, settled, made where a pipeline run's folder is given; what goes wrong is a sentence."""
    for setting, value in {**PATIENCE, "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}.items():  # it sends weights
        os.environ.setdefault(setting, value)
    from mlflow.exceptions import MlflowException

    try:
        client = _client(absolute(cluster.tracking_uri), run)
        if run and not _is_there(client, name):
            client.create_registered_model(name)
        if not _is_there(client, name):
            raise UserError(f"The registry has no model {name} yet. Run the pipeline, or mend promote.model_name.")
        found = Registry(client, name)
        if found.settle():
            print(f"registry: finished a move of {name}'s aliases that was interrupted", flush=True)
        yield found
    except (MlflowException, OSError) as error:
        raise UserError(
            f"The registry at {redact(cluster.tracking_uri)} could not be used: {redact(str(error).splitlines()[0])} "
            "Start it or mend tracking_uri in infra/cluster.yaml, then run this again."
        ) from error


def every_model(cluster: Cluster) -> list[str]:
    """Names of the registered models; none where there is no registry yet."""
    with suppress(UserError):
        return [found.name for found in _client(absolute(cluster.tracking_uri), None).search_registered_models()]
    return []


def tagged_runs(cluster: Cluster, tag: str) -> set[str]:
    """Names of pipeline runs that carry a tag in MLflow, set to anything but false."""
    with suppress(UserError):
        client = _client(absolute(cluster.tracking_uri), None)
        every = [found.experiment_id for found in client.search_experiments()]
        found = [run.data.tags for run in client.search_runs(every, f"tags.{tag} LIKE '%'")]
        return {tags["pipeline_run"] for tags in found if "pipeline_run" in tags and tags[tag].lower() != "false"}
    return set()


def run_id(folder: Path) -> str:
    """MLflow's id of a pipeline run whose registry was opened."""
    return read_json(folder / "run.json")["run_id"]


def _client(uri: str, run: Path | None) -> Any:
    from mlflow import MlflowClient

    from tasks.tracking.record import store

    if run:  # a fresh store is made by one process alone, and the forwarder may be about to
        with store(run) as client:
            return client
    file = uri.removeprefix("sqlite:///")
    if file != uri and not Path(file).exists():
        raise UserError(f"There is no registry yet ({file}). Run the pipeline first.")
    return MlflowClient(uri, registry_uri=uri)


def _places(version: Version) -> list[str]:
    """Where a version's artifacts lie, below those of its run."""
    return [f"{what}/{version.tags['manifest_sha256'][:12]}" for what in ("model", "evaluation")]


def _version(found: Any) -> Version:
    return Version(str(found.version), found.run_id, dict(found.tags))


def _is_there(client: Any, name: str) -> bool:
    return bool(client.search_registered_models(filter_string=f"name = '{name}'"))
