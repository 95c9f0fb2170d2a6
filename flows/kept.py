"""Which runs are kept, and why: those at work, those that the registry points at, those somebody tagged, the newest."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flows import ROOT, commits, runs
from flows.commits import git
from flows.runs import Record
from tasks.files import recall, sha256
from tasks.params import Cluster, load_params
from tasks.tracking.registry import OWNER, Registry, Version, is_registered, owner, registry, tagged_runs

TAG = "keep"  # of a run in MLflow


@dataclass(frozen=True)
class Run:
    """A run as git and its folder know it; by hand there is no record, and an old one may have lost its folder."""

    name: str
    since: str
    record: Record | None
    commit: str | None

    @property
    def folder(self) -> Path:
        return runs.runs_folder() / self.name

    @property
    def at_work(self) -> bool:
        return self.record is not None and self.record.now == runs.RUNNING

    @property
    def finished(self) -> bool:
        return self.commit is not None

    @property
    def damaged(self) -> bool:
        """Whether its record cannot be read: nobody knows then what it still needs."""
        return self.record is None and (self.folder / "record.json").exists()


@dataclass(frozen=True)
class Known:
    """A version of a registered model, and the aliases that lead to it."""

    model: Registry
    version: Version
    aliases: list[str]


def every_run() -> list[Run]:
    """Newest first."""
    records = {record.name: record for record in runs.records()}
    folders = {path.name for path in runs.runs_folder().glob("*") if path.is_dir()}
    found = []
    for name in folders | set(commits.finished()):
        record, commit = records.get(name), commits.find(name)
        found.append(Run(name, _since(name, record, commit), record, commit))
    return sorted(found, key=lambda run: run.since, reverse=True)


def _since(name: str, record: Record | None, commit: str | None) -> str:
    if record:
        return record.since
    folder = runs.runs_folder() / name
    seconds = (
        folder.stat().st_mtime if folder.exists() else float(git(ROOT, "show", "-s", "--format=%ct", commit or ""))
    )
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def every_version(cluster: Cluster, every: list[Run]) -> list[Known]:
    """Of the models that this checkout has promoted to; a shared registry has others, too."""
    found = []
    for name in sorted(_model_names(every)):
        if not is_registered(cluster, name):
            continue
        with registry(cluster, name) as model:
            aliases = model.aliases()
            for version in model.versions():
                found.append(Known(model, version, sorted(a for a, n in aliases.items() if n == version.number)))
    return found


def _model_names(every: list[Run]) -> set[str]:
    notes = (run.folder / "params.json" for run in every)
    used = (recall(note).get("promote", {}).get("model_name") for note in notes)
    return {str(name) for name in used if name} | {load_params(ROOT / "params.yaml").promote.model_name}


def choose(every: list[Run], versions: list[Known], cluster: Cluster, newest: int) -> dict[str, str]:
    """Why each run that is kept is kept."""
    reasons = {run.name: "recent" for run in every[:newest]}
    reasons |= dict.fromkeys(tagged_runs(cluster, TAG), f"tagged {TAG} in MLflow")
    reasons |= {run.name: f"git tag {tag}" for run in every for tag in _tags(run)}
    for known in versions:
        name = known.version.tags.get("run", "")
        if known.version.tags.get(TAG, "false") != "false":
            reasons[name] = f"version {known.version.number} of {known.model.name} is tagged {TAG}"
        if known.aliases:
            reasons[name] = f"{' and '.join(known.aliases)} of {known.model.name}"
    reasons |= {run.name: "at work" for run in every if run.at_work}
    return {run.name: reasons[run.name] for run in every if run.name in reasons}


def _tags(run: Run) -> list[str]:
    return git(ROOT, "tag", "--points-at", run.commit).splitlines() if run.commit else []


def is_needed(known: Known, kept: list[Run]) -> bool:
    """Whether a version stays: this checkout did not make it, it has an alias or the tag, or a kept run made it or made
    the same again."""
    if known.version.tags.get(OWNER) != owner():
        return True
    if known.aliases or known.version.tags.get(TAG, "false") != "false":
        return True
    manifests = (run.folder / runs.RESULTS / "data/model/manifest.json" for run in kept)
    made = {sha256(path) for path in manifests if path.exists()}
    if known.version.tags.get("manifest_sha256") in made:
        return True
    return known.version.tags.get("run") in {run.name for run in kept}


def unsent(folder: Path) -> bool:
    """Whether a run's journals hold figures that MLflow has not got yet."""
    for journal in folder.glob("*.jsonl"):
        note = journal.with_name(f"{journal.stem}.sent.json")
        if recall(note).get("offset", 0) < journal.stat().st_size:
            return True
    return False
