"""Versions and aliases in MLflow's registry; with record.py the only code that talks to MLflow.

Aliases move together: what they shall become is written down first (one tag, one call), and who comes next finishes
what a crash left half done. Whoever moves them holds the model's lock (lease.py).

A version carries the tag OWNER, the id of the checkout that made it. `dpo gc` removes no other version.
"""

import json
import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.config.params import Cluster
from tasks.config.paths import home
from tasks.errors import UserError
from tasks.redact import redact
from tasks.system import disk
from tasks.system.files import read_json
from tasks.system.lock import file_lock
from tasks.tracking import artifact_store
from tasks.tracking.lease import Turn, turn
from tasks.tracking.mlflow_client import absolute_uri, limit_waiting, log_in, without_retries

LARGEST_UPLOAD = 2**30  # weights above it stay where they are, named by hash
WEIGHTS = (".safetensors", ".gguf")
DELETED = "deleted by `dpo gc`, because the gate refused the version"  # the value of its tag `weights`
MOVING = "moving"
OWNER = "dpo.owner"  # tag of a version: the checkout that made it
SHA256 = re.compile(r"[0-9a-f]{64}")
ABOUT = (
    "Models that the DPO pipeline exported, one version per export, each with its manifest and evaluation.  \n"
    "`champion` passed the gate (params.yaml, promote); `previous` is the champion before it; `challenger` the newest."
)
PREVIOUS, CHALLENGER = "previous", "challenger"


class NotRegistered(UserError):
    """The registry is reachable and has no such model or version, or there is no registry yet."""


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

    def others(self) -> str:
        """A sentence that names the other registered models and how to name one of their versions."""
        return _others(self.client, self.name)

    def of_run(self, name: str) -> Version | None:
        """The newest version that a pipeline run made."""
        return next((version for version in reversed(self.versions()) if version.tags.get("run") == name), None)

    def add(
        self, run_id: str, folder: Path, evaluation: list[Path], tags: dict[str, str], description: str = ""
    ) -> Version:
        """A new version: the export and its evaluation as artifacts, each under the manifest's hash."""
        place = tags["manifest_sha256"][:12]
        small = disk.size_of(folder) <= LARGEST_UPLOAD
        root = self.client.get_run(run_id).info.artifact_uri
        artifact_store.remove_partial_uploads(root, place)
        for path in sorted(folder.iterdir()):
            if (small or path.suffix not in WEIGHTS) and not artifact_store.link(path, root, f"model/{place}"):
                self.client.log_artifact(run_id, str(path), f"model/{place}")
        for path in evaluation:
            self.client.log_artifact(run_id, str(path), f"evaluation/{place}")
        weights = "stored" if small else f"too large to store: `dpo open {tags['run']}`"
        tags = {**tags, "weights": weights, OWNER: owner()}
        source = f"{root}/model/{place}"
        with self.exclusively():  # another run may have registered the same export meanwhile
            return self.with_manifest(tags["manifest_sha256"]) or self._create(
                source, run_id, tags, redact(description)
            )

    def _create(self, source: str, run_id: str, tags: dict[str, str], description: str) -> Version:
        from mlflow.exceptions import MlflowException

        try:
            with without_retries():
                made = self.client.create_model_version(self.name, source, run_id, tags=tags, description=description)
                return _version(made)
        except MlflowException:
            if made := self.with_manifest(tags["manifest_sha256"]):  # only the answer was lost
                return made
            raise

    def fetch(self, version: Version, what: str, file: str = "") -> Path:
        """`model` or `evaluation` of a version, or one file of it: where it lies, or a copy of what lies elsewhere."""
        place = f"{what}/{self.digest(version)[:12]}/{file}".rstrip("/")
        root = self._root(version)
        if artifact_store.is_local(root):
            return artifact_store.inside(root, place)
        # `what` is in the path, since MLflow keeps only the last part of `place`, which both have in common.
        copies = home() / ".scratch" / "registry" / self.name / version.number / what
        copies.mkdir(parents=True, exist_ok=True)
        return Path(self.client.download_artifacts(version.run_id, place, str(copies)))

    def store(self, version: Version, what: str, file: Path) -> None:
        """One more file of a version, or a newer one."""
        self.client.log_artifact(version.run_id, str(file), f"{what}/{self.digest(version)[:12]}")

    def aliases(self) -> dict[str, str]:
        """The version at each alias."""
        return {alias: str(number) for alias, number in self.client.get_registered_model(self.name).aliases.items()}

    def notes(self) -> dict[str, str]:
        """The tags of the registered model itself, which outlive its versions."""
        return dict(self.client.get_registered_model(self.name).tags)

    def note(self, name: str, value: str | None, held: Turn) -> None:
        """Set a tag of the registered model; None deletes it."""
        held.check()
        if value is None:
            self.client.delete_registered_model_tag(self.name, name)
        else:
            self.client.set_registered_model_tag(self.name, name, value)

    def digest(self, version: Version) -> str:
        """The hash of a version's manifest, by which its artifacts are found: anybody may have edited the tag."""
        found = version.tags.get("manifest_sha256", "")
        if not SHA256.fullmatch(found):
            raise UserError(
                f"Version {version.number} of {self.name} has the tag manifest_sha256 '{found[:80]}', which is no "
                "SHA-256 hash. Another tool made this version, or somebody edited the tag. Restore the tag in MLflow."
            )
        return found

    def size(self, version: Version, *, weights: bool = False) -> int:
        """Bytes that deleting a version's artifacts, or its weights alone, frees on this machine."""
        suffixes = WEIGHTS if weights else ("",)
        return artifact_store.freed_bytes(self._root(version), self._places(version), suffixes)

    def remove(self, version: Version) -> None:
        """The artifacts of a version of this checkout, then the version; its MLflow run stays, with all its metrics."""
        with self._unused(version):
            artifact_store.delete(self.client, self._root(version), self._places(version))
            self.client.delete_model_version(self.name, version.number)

    def remove_weights(self, version: Version) -> None:
        """The weights of a version of this checkout; its metrics, manifest and answers stay."""
        with self._unused(version):
            place = self._places(version)[0]
            listed = [artifact.path for artifact in self.client.list_artifacts(version.run_id, place)]
            self.tag(version, {"weights": DELETED})
            artifact_store.delete(self.client, self._root(version), [path for path in listed if path.endswith(WEIGHTS)])

    def restore_weights(self, version: Version, folder: Path) -> None:
        """Store the weights of a version again that `remove_weights` has deleted."""
        if version.tags.get("weights") == DELETED:
            for path in folder.iterdir():
                if path.suffix in WEIGHTS:
                    self.store(version, "model", path)
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

    def _places(self, version: Version) -> list[str]:
        """Where a version's artifacts lie, below those of its run."""
        return [f"{what}/{self.digest(version)[:12]}" for what in ("model", "evaluation")]

    def tag(self, version: Version, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self.client.set_model_version_tag(self.name, version.number, name, value)

    def describe(self, version: Version, line: str) -> None:
        """One more line on the version's page in MLflow."""
        now = self.client.get_model_version(self.name, version.number).description or ""
        self.client.update_model_version(self.name, version.number, redact(f"{now}  \n{line}"))

    @contextmanager
    def exclusively(self) -> Iterator[Turn]:
        """Nobody else moves aliases or adds versions of this model, on any machine; a half-done move is finished."""
        with turn(self.client, self.name) as held:
            if content := self._half_done():
                self._apply(Moves(**json.loads(content)), held)
                print(f"registry: finished a move of {self.name}'s aliases that was interrupted", flush=True)
            yield held

    def move(self, moves: Moves, held: Turn) -> None:
        held.check()
        content = json.dumps({"aliases": moves.aliases, "tags": moves.tags})
        self.client.set_registered_model_tag(self.name, MOVING, content)
        self._apply(moves, held)

    def settle(self) -> None:
        """Finish what a crash left half done."""
        if self._half_done():
            with self.exclusively():
                pass

    def _half_done(self) -> str | None:
        return self.client.get_registered_model(self.name).tags.get(MOVING)

    def _apply(self, moves: Moves, held: Turn) -> None:
        now = self.client.get_registered_model(self.name).aliases
        for version, tags in moves.tags.items():
            for name, value in tags.items():
                held.check()
                self.client.set_model_version_tag(self.name, version, name, value)
        for alias, number in moves.aliases.items():
            held.check()
            if number is not None:
                self.client.set_registered_model_alias(self.name, alias, number)
            elif alias in now:
                self.client.delete_registered_model_alias(self.name, alias)
        held.check()
        self.client.delete_registered_model_tag(self.name, MOVING)


@contextmanager
def registry(cluster: Cluster, name: str, run: Path | None = None) -> Iterator[Registry]:
    """The registered model, settled, made where a pipeline run's folder is given; what goes wrong is a sentence."""
    limit_waiting(MLFLOW_HTTP_REQUEST_TIMEOUT="60")  # it sends weights
    from mlflow.exceptions import MlflowException

    try:
        client = open_client(absolute_uri(cluster.tracking_uri), run)
        if run and not _is_there(client, name):
            client.create_registered_model(name, description=ABOUT)
        if not _is_there(client, name):
            others = _others(client, name) or "Run the pipeline first."
            raise NotRegistered(f"The registry has no model {name}. {others}")
        found = Registry(client, name)
        found.settle()
        yield found
    except (MlflowException, OSError) as error:
        if sentence := disk.explain(error):
            raise UserError(sentence) from error
        raise UserError(
            f"The registry at {redact(cluster.tracking_uri)} could not be used: {redact(str(error).splitlines()[0])} "
            "Start it or mend tracking_uri in infra/cluster.yaml, then run this again."
        ) from error


def is_registered(cluster: Cluster, name: str) -> bool:
    """Whether the registry has a model of that name; False where there is no registry yet."""
    with suppress(UserError):
        return _is_there(open_client(absolute_uri(cluster.tracking_uri), None), name)
    return False


def owner() -> str:
    """The id of this checkout, the same in all its worktrees, made at first use.

    Not of a team: only the checkout that made a version knows which of its runs are kept.
    """
    path = home() / ".scratch" / "owner"
    with file_lock(path.with_suffix(".lock")):
        if not path.exists():
            aside = path.with_name(".owner")
            aside.write_text(uuid.uuid4().hex)
            os.replace(aside, path)
        return path.read_text()


def run_id(folder: Path) -> str:
    """MLflow's id of a pipeline run whose registry was opened."""
    return read_json(folder / "run.json")["run_id"]


def open_client(uri: str, run: Path | None) -> Any:
    from mlflow import MlflowClient

    from tasks.tracking.mlflow_writer import store

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # its tracebacks: ours is the sentence
    log_in(uri, "writer")
    if run:  # a fresh store is made by one process alone, and the forwarder may be about to
        with store(run) as client:
            return client
    file = uri.removeprefix("sqlite:///")
    if file != uri and not Path(file).exists():
        raise NotRegistered(f"There is no registry yet ({file}). Run the pipeline first.")
    return MlflowClient(uri, registry_uri=uri)


def _version(found: Any) -> Version:
    return Version(str(found.version), found.run_id, dict(found.tags))


def _others(client: Any, name: str) -> str:
    names = [model.name for model in client.search_registered_models() if model.name != name]
    return f"Other registered models: {', '.join(names)}. Name one of them, as in {names[0]}/champion." if names else ""


def _is_there(client: Any, name: str) -> bool:
    return bool(client.search_registered_models(filter_string=f"name = '{name}'"))
