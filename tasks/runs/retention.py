"""Which runs `dpo gc` keeps, and why: running, referenced by the registry, tagged, or recent.

Of a run that is only recent and whose model the gate refused, it keeps everything but the exported weights.
"""

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from tasks.config.cluster import Cluster
from tasks.config.params import load_params
from tasks.config.paths import ROOT
from tasks.runs import commits, dvc_lock, records
from tasks.runs.commits import git
from tasks.runs.dvc_lock import Entry
from tasks.runs.records import RunRecord
from tasks.system.files import read_json_or_empty, sha256
from tasks.tracking.registry import OWNER, Registry, Version, is_registered, owner, registry, tagged_runs

RECENT = "recent"
WITHOUT_WEIGHTS = f"{RECENT}, without its exported weights: the gate refused the model"
TAG = "keep"  # of a run or a version in MLflow


@dataclass(frozen=True)
class StoredRun:
    """A run by its folder and its commit. A run by hand has no record, and an old run may have lost its folder."""

    name: str
    record: RunRecord | None
    commit: str | None

    @property
    def folder(self) -> Path:
        return records.runs_folder() / self.name

    @cached_property
    def since(self) -> str:
        if self.record:
            return self.record.since
        committed = "" if self.folder.exists() else git(ROOT, "show", "-s", "--format=%ct", self.commit or "")
        seconds = float(committed or self.folder.stat().st_mtime)
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")

    @property
    def is_running(self) -> bool:
        return self.record is not None and self.record.current_state == records.RUNNING

    @property
    def is_finished(self) -> bool:
        done = self.record is None or self.record.state == records.FINISHED
        return done and self.commit is not None

    @property
    def is_damaged(self) -> bool:
        """Whether its record cannot be read, so that we do not know what the run still needs."""
        return self.record is None and (self.folder / "record.json").exists()

    def lock(self) -> dict[str, Entry]:
        """The dvc.lock of its commit or, while it is not finished, of its workspace."""
        if self.commit:
            return commits.lock_of(self.commit)
        return dvc_lock.read_lock(Path(self.record.root)) if self.record else {}

    def tags(self) -> list[str]:
        return git(ROOT, "tag", "--points-at", self.commit).splitlines() if self.commit else []


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model, and the aliases that point at it."""

    model: Registry
    version: Version
    aliases: list[str]

    @property
    def name(self) -> str:
        return f"{self.model.name}/{self.version.number}"

    @property
    def run(self) -> str:
        """The name of the run that made it."""
        return self.version.tags.get("run", "")

    @property
    def is_tagged(self) -> bool:
        return self.version.tags.get(TAG, "false") != "false"

    @property
    def has_refused_weights(self) -> bool:
        return self.is_refused and self.version.tags.get("weights") == "stored"

    @property
    def is_refused(self) -> bool:
        """Whether the gate refused it and nothing else needs its weights: neither an alias, a tag nor a person."""
        tags = self.version.tags
        decided = tags.get("promoted") == "false" and tags.get("waiting") != "true" and not tags.get("rolled_back")
        return decided and tags.get(OWNER) == owner() and not self.aliases and not self.is_tagged


def all_runs() -> list[StoredRun]:
    """Newest first."""
    records_by_name = {record.name: record for record in records.all_records()}
    run_commits = commits.finished_runs()
    folders = {path.name for path in records.runs_folder().glob("*/")}
    runs = [StoredRun(name, records_by_name.get(name), run_commits.get(name)) for name in folders | run_commits.keys()]
    return sorted(runs, key=lambda run: run.since, reverse=True)


def registered_versions(cluster: Cluster, runs: list[StoredRun]) -> list[RegisteredVersion]:
    """The versions of the models that this checkout has promoted to; a shared registry has others, too."""
    versions = []
    for name in sorted(_model_names(runs)):
        if not is_registered(cluster, name):
            continue
        with registry(cluster, name) as model:
            numbers = model.aliases()
            for version in model.versions():
                aliases = sorted(alias for alias, number in numbers.items() if number == version.number)
                versions.append(RegisteredVersion(model, version, aliases))
    return versions


def _model_names(runs: list[StoredRun]) -> set[str]:
    names = (read_json_or_empty(run.folder / "params.json").get("promote", {}).get("model_name") for run in runs)
    return {str(name) for name in names if name} | {load_params(ROOT / "params.yaml").promote.model_name}


def reasons_to_keep(
    runs: list[StoredRun], versions: list[RegisteredVersion], cluster: Cluster, newest: int
) -> dict[str, str]:
    """The names of the runs to keep, each with a reason."""
    refused = {registered.run for registered in versions if registered.is_refused}
    reasons = {run.name: WITHOUT_WEIGHTS if run.name in refused else RECENT for run in runs[:newest]}
    reasons |= dict.fromkeys(tagged_runs(cluster, TAG), f"tagged {TAG} in MLflow")
    reasons |= {run.name: f"git tag {tag}" for run in runs for tag in run.tags()}
    for registered in versions:
        if registered.is_tagged:
            reasons[registered.run] = f"version {registered.version.number} of {registered.model.name} is tagged {TAG}"
        if registered.aliases:
            reasons[registered.run] = f"{' and '.join(registered.aliases)} of {registered.model.name}"
    reasons |= {run.name: "running" for run in runs if run.is_running}
    return {run.name: reasons[run.name] for run in runs if run.name in reasons}


def is_needed(registered: RegisteredVersion, kept: list[StoredRun]) -> bool:
    """Whether a version stays: another checkout made it, it has an alias or the tag, or a kept run made it or made an
    identical model."""
    tags = registered.version.tags
    if tags.get(OWNER) != owner() or registered.aliases or registered.is_tagged:
        return True
    manifests = (run.folder / records.RESULTS / "data/model/manifest.json" for run in kept)
    if tags.get("manifest_sha256") in {sha256(path) for path in manifests if path.exists()}:
        return True
    return registered.run in {run.name for run in kept}
