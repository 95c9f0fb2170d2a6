"""Versions and aliases in MLflow's registry.

Aliases move together: one call writes the planned aliases into a tag of the model, and after a crash the next process
completes the move. Moving them requires the model's lock (lease.py).

A version carries the tag OWNER, the id of the checkout that registered it. `dpo gc` removes no other version.
"""

import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.config.cluster import Cluster
from tasks.config.paths import main_checkout
from tasks.errors import UserError
from tasks.secrets.redact import redact
from tasks.system import disk
from tasks.system.files import read_json, write_text
from tasks.system.lock import file_lock
from tasks.tracking import artifact_store
from tasks.tracking.lease import Lease, hold_lease
from tasks.tracking.mlflow_client import absolute_uri, database, limit_waiting, log_in, without_retries

LARGEST_UPLOAD = 2**30  # bytes; weights above it stay in DVC's cache
WEIGHTS = (".safetensors", ".gguf")
DELETED = "deleted by `dpo gc`, because the gate refused the version"  # the value of its tag `weights`
MOVING = "moving"  # tag of a registered model: the move of aliases that is under way
OWNER = "dpo.owner"  # tag of a version: the checkout that registered it
SHA256 = re.compile(r"[0-9a-f]{64}")
ABOUT = (
    "Models that the DPO pipeline exported, one version per export, each with its manifest and evaluation.  \n"
    "`champion` passed the gate (params.yaml, promote); `previous` is the champion before it; `challenger` the newest."
)
PREVIOUS, CHALLENGER = "previous", "challenger"
KINDS = ("model", "evaluation")  # of a version's artifacts


class NotRegistered(UserError):
    """The registry is reachable and has no such model or version, or there is no registry yet."""


@dataclass(frozen=True)
class Moves:
    """New values of aliases (None removes the alias) and of versions' tags."""

    aliases: Mapping[str, str | None]
    tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Version:
    number: str
    run_id: str  # MLflow's, of the run that has its artifacts
    tags: Mapping[str, str]

    @property
    def run(self) -> str:
        """The pipeline run that made it; empty if another tool did."""
        return self.tags.get("run", "")


@dataclass(frozen=True)
class Champion:
    model: str
    version: str
    run: str  # that made it
    since: float  # when it was registered, seconds since the epoch
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Registry:
    """The versions of one model."""

    client: Any
    name: str

    def find(self) -> Any | None:
        """MLflow's registered model."""
        return next(iter(self.client.search_registered_models(filter_string=f"name = '{self.name}'")), None)

    def others(self) -> str:
        """A sentence that names the other registered models and how to name one of their versions."""
        names = [model.name for model in self.client.search_registered_models() if model.name != self.name]
        if not names:
            return ""
        return f"Other registered models: {', '.join(names)}. Name one of them, as in {names[0]}/champion."

    def versions(self) -> list[Version]:
        versions = map(_version, self.client.search_model_versions(f"name = '{self.name}'"))
        return sorted(versions, key=lambda version: int(version.number))

    def version(self, number: str) -> Version | None:
        return next((version for version in self.versions() if version.number == number), None)

    def with_manifest(self, digest: str) -> Version | None:
        return next((version for version in self.versions() if version.tags.get("manifest_sha256") == digest), None)

    def of_run(self, name: str) -> Version | None:
        """The newest version that a pipeline run made."""
        return next((version for version in reversed(self.versions()) if version.run == name), None)

    def at(self, alias: str) -> Version | None:
        number = self.aliases().get(alias)
        return None if number is None else self.version(number)

    def aliases(self) -> dict[str, str]:
        """The version at each alias."""
        return {alias: str(number) for alias, number in self.client.get_registered_model(self.name).aliases.items()}

    def add(
        self, run_id: str, folder: Path, evaluation: list[Path], tags: dict[str, str], description: str = ""
    ) -> Version:
        """A new version: the export and its evaluation as artifacts, each under the manifest's hash."""
        digest = tags["manifest_sha256"]
        model_path, evaluation_path = (_artifact_path(kind, digest) for kind in KINDS)
        fits = disk.size_of(folder) <= LARGEST_UPLOAD
        root = self.client.get_run(run_id).info.artifact_uri
        artifact_store.remove_partial_uploads(root, (model_path, evaluation_path))
        for path in sorted(folder.iterdir()):
            if (fits or path.suffix not in WEIGHTS) and not artifact_store.link(path, root, model_path):
                self.client.log_artifact(run_id, str(path), model_path)
        for path in evaluation:
            self.client.log_artifact(run_id, str(path), evaluation_path)
        weights = "stored" if fits else f"too large to store: `dpo open {tags['run']}`"
        tags = {**tags, "weights": weights, OWNER: owner()}
        with self.exclusively():  # another run may have registered the same export meanwhile
            return self.with_manifest(digest) or self._create(f"{root}/{model_path}", run_id, tags, redact(description))

    def _create(self, source: str, run_id: str, tags: dict[str, str], description: str) -> Version:
        from mlflow.exceptions import MlflowException

        try:
            with without_retries():
                version = self.client.create_model_version(
                    self.name, source, run_id, tags=tags, description=description
                )
            return _version(version)
        except MlflowException:
            if registered := self.with_manifest(tags["manifest_sha256"]):  # only the answer was lost
                return registered
            raise

    def fetch(self, version: Version, kind: str, file: str = "") -> Path:
        """The folder with the `model` or `evaluation` of a version, or one file of it. Remote files are downloaded."""
        path = f"{_artifact_path(kind, self.digest(version))}/{file}".rstrip("/")
        root = self._root(version)
        if artifact_store.is_local(root):
            return artifact_store.inside(root, path)
        # `kind` is in the target, since MLflow keeps only the last part of `path`, which both kinds have in common.
        target = main_checkout() / ".scratch" / "registry" / self.name / version.number / kind
        target.mkdir(parents=True, exist_ok=True)
        return Path(self.client.download_artifacts(version.run_id, path, str(target)))

    def store(self, version: Version, file: Path) -> None:
        """Add a file to the model of a version, or replace it."""
        self.client.log_artifact(version.run_id, str(file), _artifact_path("model", self.digest(version)))

    def digest(self, version: Version) -> str:
        """The hash of a version's manifest, which names its artifacts. Checked: anybody may have edited the tag."""
        digest = version.tags.get("manifest_sha256", "")
        if not SHA256.fullmatch(digest):
            raise UserError(
                f"Version {version.number} of {self.name} has the tag manifest_sha256 '{digest[:80]}', which is no "
                "SHA-256 hash. Another tool made this version, or somebody edited the tag. Restore the tag in MLflow."
            )
        return digest

    def size(self, version: Version, *, weights: bool = False) -> int:
        """Bytes that deleting a version's artifacts, or its weights alone, frees on this machine."""
        suffixes = WEIGHTS if weights else ("",)
        return artifact_store.freed_bytes(self._root(version), self._artifact_paths(version), suffixes)

    def remove(self, version: Version) -> None:
        """The artifacts of a version of this checkout, then the version; its MLflow run stays, with all its metrics."""
        with self._unused(version):
            artifact_store.delete(self.client, self._root(version), self._artifact_paths(version))
            self.client.delete_model_version(self.name, version.number)

    def remove_weights(self, version: Version) -> None:
        """The weights of a version of this checkout; its metrics, manifest and answers stay."""
        with self._unused(version):
            folder = _artifact_path("model", self.digest(version))
            files = [artifact.path for artifact in self.client.list_artifacts(version.run_id, folder)]
            self.tag(version, {"weights": DELETED})
            artifact_store.delete(self.client, self._root(version), [path for path in files if path.endswith(WEIGHTS)])

    def restore_weights(self, version: Version, folder: Path) -> None:
        """Store the weights of a version again if `remove_weights` has deleted them."""
        if version.tags.get("weights") == DELETED:
            for path in folder.iterdir():
                if path.suffix in WEIGHTS:
                    self.store(version, path)
            self.tag(version, {"weights": "stored"})

    @contextmanager
    def _unused(self, version: Version) -> Iterator[None]:
        """Hold the model's lock while a version of this checkout has no alias."""
        with self.exclusively():
            now = self.version(version.number)
            if now is None or now.tags.get(OWNER) != owner() or version.number in self.aliases().values():
                raise UserError(
                    f"Version {version.number} of {self.name} has changed since it was looked at: it got an alias or "
                    "another owner, or is gone. It was not deleted. Run `dpo gc` again."
                )
            yield

    def _root(self, version: Version) -> str:
        return str(self.client.get_run(version.run_id).info.artifact_uri)

    def _artifact_paths(self, version: Version) -> list[str]:
        return [_artifact_path(kind, self.digest(version)) for kind in KINDS]

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self.client.set_model_version_tag(self.name, version.number, name, value)

    def describe(self, version: Version, line: str) -> None:
        """One more line on the version's page in MLflow."""
        now = self.client.get_model_version(self.name, version.number).description or ""
        self.client.update_model_version(self.name, version.number, redact(f"{now}  \n{line}"))

    def model_tags(self) -> dict[str, str]:
        """The tags of the registered model itself, which outlive its versions."""
        return dict(self.client.get_registered_model(self.name).tags)

    def set_model_tag(self, name: str, value: str | None, lease: Lease) -> None:
        """Set a tag of the registered model; None deletes it."""
        lease.check()
        if value is None:
            self.client.delete_registered_model_tag(self.name, name)
        else:
            self.client.set_registered_model_tag(self.name, name, value)

    @contextmanager
    def exclusively(self) -> Iterator[Lease]:
        """Hold the model's lock: no other process, on any machine, moves aliases or adds versions meanwhile."""
        with hold_lease(self.client, self.name) as lease:
            if content := lease.tags.get(MOVING):
                self._apply(Moves(**json.loads(content)), lease)
                print(f"registry: finished a move of {self.name}'s aliases that was interrupted", flush=True)
            yield lease

    def move(self, moves: Moves, lease: Lease) -> None:
        self.set_model_tag(MOVING, json.dumps(vars(moves)), lease)
        self._apply(moves, lease)

    def _apply(self, moves: Moves, lease: Lease) -> None:
        current = self.aliases()
        for version, tags in moves.tags.items():
            for name, value in tags.items():
                lease.check()
                self.client.set_model_version_tag(self.name, version, name, value)
        for alias, number in moves.aliases.items():
            lease.check()
            if number is not None:
                self.client.set_registered_model_alias(self.name, alias, number)
            elif alias in current:
                self.client.delete_registered_model_alias(self.name, alias)
        self.set_model_tag(MOVING, None, lease)


@contextmanager
def registry(cluster: Cluster, name: str, run: Path | None = None) -> Iterator[Registry]:
    """The registered model; with the folder of a pipeline run it is created if needed. Errors become a UserError."""
    limit_waiting(MLFLOW_HTTP_REQUEST_TIMEOUT="60")  # it sends weights
    from mlflow.exceptions import MlflowException

    try:
        model_registry = Registry(open_client(cluster, run), name)
        if not (model := model_registry.find()):
            if run is None:
                advice = model_registry.others() or "Run the pipeline first."
                raise NotRegistered(f"The registry has no model {name}. {advice}")
            model_registry.client.create_registered_model(name, description=ABOUT)
        elif MOVING in model.tags:  # a crash interrupted a move of aliases: complete it
            with model_registry.exclusively():
                pass
        yield model_registry
    except (MlflowException, OSError) as error:
        if sentence := disk.explain(error):
            raise UserError(sentence) from error
        raise UserError(
            f"The registry at {redact(cluster.tracking_uri)} could not be used: {redact(str(error).splitlines()[0])} "
            "Start it or correct tracking_uri in infra/cluster.yaml, then run this again."
        ) from error


def is_registered(cluster: Cluster, name: str) -> bool:
    """Whether the registry has a model of that name; False where there is no registry yet."""
    with suppress(UserError):
        return Registry(open_client(cluster), name).find() is not None
    return False


def champions(uri: str, alias: str, metrics: Sequence[str]) -> list[Champion]:
    """The version at the alias of each registered model, with these metrics of the run that made it; only reads."""
    from mlflow import MlflowClient

    log_in(uri, "reader")
    client, entries = MlflowClient(uri, registry_uri=uri), []
    for model in client.search_registered_models():
        if (number := model.aliases.get(alias)) is not None:
            version = client.get_model_version(model.name, number)
            logged = client.get_run(version.run_id).data.metrics if version.run_id else {}
            values = {name: value for name in metrics if (value := _logged(logged, name)) is not None}
            since = version.creation_timestamp / 1000
            entries.append(Champion(model.name, str(number), version.tags.get("run", ""), since, values))
    return entries


def _logged(metrics: Mapping[str, float], name: str) -> float | None:
    """A metric of data/metrics/evaluate.json, under its name in MLflow (results.evaluation)."""
    names = (name, f"eval/{name}", f"{name}/rate", f"eval/{name}/rate")
    return next((metrics[known] for known in names if known in metrics), None)


def tagged_runs(cluster: Cluster, tag: str) -> set[str]:
    """Names of pipeline runs that carry a tag in MLflow, set to anything but false."""
    with suppress(UserError):
        client = open_client(cluster)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        tags = [run.data.tags for run in client.search_runs(experiments, f"tags.{tag} LIKE '%'")]
        return {names["pipeline_run"] for names in tags if "pipeline_run" in names and names[tag].lower() != "false"}
    return set()


def owner() -> str:
    """The id of this checkout, the same in all its worktrees, created at first use.

    Not of a team: only the checkout that made a version knows which of its runs are kept.
    """
    path = main_checkout() / ".scratch" / "owner"
    with file_lock(path.with_suffix(".lock")):
        if not path.exists():
            write_text(path, uuid.uuid4().hex)
        return path.read_text()


def run_id(folder: Path) -> str:
    """MLflow's id of a pipeline run whose registry was opened."""
    return read_json(folder / "run.json")["run_id"]


def open_client(cluster: Cluster, run: Path | None = None) -> Any:
    """A client that may write; with the folder of a pipeline run, also the run's entry in MLflow."""
    from mlflow import MlflowClient

    from tasks.tracking.mlflow_writer import open_store

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # its tracebacks: our message says it
    uri = absolute_uri(cluster.tracking_uri)
    log_in(uri, "writer")
    if run:  # one process alone creates a new store, and the uploader may be about to
        return open_store(run)
    if (file := database(uri)) and not file.exists():
        raise NotRegistered(f"There is no registry yet ({file}). Run the pipeline first.")
    return MlflowClient(uri, registry_uri=uri)


def _version(version: Any) -> Version:
    return Version(str(version.version), version.run_id, dict(version.tags))


def _artifact_path(kind: str, digest: str) -> str:
    """The folder with the `model` or `evaluation` of a version, below the artifacts of its MLflow run."""
    return f"{kind}/{digest[:12]}"
