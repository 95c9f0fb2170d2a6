"""`dpo forget --user X`: erase a person's feedback, and every run, data set and model that was made from their rows.

Training is deterministic, and the order of steps depends on the number of pairs. No checkpoint of a run that had the
rows therefore belongs to a run that never had them: the model is trained again from the start, and its hashes equal
those of a run without the rows. Earlier runs that never had the rows stay as they are.

The champion is never deleted. Where it was made from the rows, the command names what to do first; the same command
again deletes the old version once another is champion.
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.checkout import kept_checkout
from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import load_params
from tasks.config.paths import MODEL, RAW, ROOT
from tasks.errors import UserError
from tasks.feedback import answer_cache, traces
from tasks.prepare.raw_rows import belongs_to, raw_sources, rows_of
from tasks.runs import commits, dvc, dvc_lock, gc, records
from tasks.runs.retention import RegisteredVersion, all_runs, registered_versions
from tasks.source.fetch import data_sources, local_files
from tasks.source.readers import read_rows
from tasks.system.files import read_json_or_empty, write_json
from tasks.tracking import artifact_store
from tasks.tracking.registry import CHALLENGER, PREVIOUS, Moves, open_client

SHOWN = 50  # row numbers of a file


@dataclass(frozen=True)
class PersonalData:
    """Where a person's rows are."""

    sources: dict[str, list[int]]  # rows of the user's own files, by file
    runs: dict[str, int]  # number of rows in data/raw, by run
    elsewhere: dict[str, int]  # the same, by branch, tag or checkout
    versions: list[RegisteredVersion]  # made by these runs

    def in_use(self) -> list[RegisteredVersion]:
        """Versions behind an alias such as champion: they serve people until another takes the alias."""
        return [version for version in self.versions if set(version.aliases) - {PREVIOUS, CHALLENGER}]

    def runs_in_use(self) -> set[str]:
        return {version.run for version in self.in_use()}

    def is_empty(self) -> bool:
        return not (self.sources or self.runs or self.elsewhere)


@kept_checkout(ROOT)
def forget(user: str, yes: bool) -> None:
    if not user.strip():
        raise UserError("--user is empty. Name the person as the column `user` of the rows does.")
    cluster = load_cluster(ROOT)
    before = find(cluster, user)
    print("\n".join(_description(before)))
    if not yes:
        print("Nothing is deleted yet: add --yes to erase the feedback, and these runs, data sets and versions.")
        return
    events = traces.erase(cluster, user) + answer_cache.erase(user)
    print(f"deleted  {events} answers and votes")
    _delete(cluster, before)
    after = find(cluster, user)
    path = _certify(user, events, before, after)
    print("\n".join(_next_steps(after)) or "Nothing made from these rows is left in this checkout.")
    print(f"The certificate is {path}.")


def find(cluster: Cluster, user: str) -> PersonalData:
    count = partial(_count, user=user, known={})
    runs = all_runs()
    with_rows = {run.name: rows for run in runs if (rows := count(run.lock()))}
    elsewhere = {ref: rows for ref in ("HEAD", *commits.branches_and_tags()) if (rows := count(commits.lock_of(ref)))}
    if (ROOT / RAW / "manifest.json").exists() and (rows := _rows(ROOT, user)):
        elsewhere["data/raw of this checkout"] = rows
    versions = [version for version in registered_versions(cluster, runs) if version.run in with_rows]
    return PersonalData(_source_rows(user), with_rows, elsewhere, versions)


def _count(lock: Mapping[str, dvc_lock.Entry], user: str, known: dict[str, int]) -> int:
    """The person's rows in the data/raw that a dvc.lock names, read from DVC's cache.

    `known` has the counts by hash: several runs share one data set.
    """
    md5 = dvc_lock.outs(lock.get("source", {})).get(str(RAW))
    if md5 is None:
        return 0
    if md5 not in known:
        with TemporaryDirectory() as folder:
            known[md5] = _rows(Path(folder), user) if _link(md5, Path(folder) / RAW) else 0
    return known[md5]


def _link(md5: str, folder: Path) -> bool:
    """Create the folder of a hash with links into DVC's cache; False if the cache does not have all of it."""
    try:
        files = dvc.cached_files(md5)
    except KeyError:
        return False
    for name, target in files.items():
        if not target.exists():
            return False
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    return True


def _rows(root: Path, user: str) -> int:
    return sum(belongs_to(row, user) for source in raw_sources(root) for _, _, row in rows_of(source, root))


def _source_rows(user: str) -> dict[str, list[int]]:
    """Rows of the files that params.yaml names now: the next run would read them again."""
    numbers: dict[str, list[int]] = {}
    for entry in data_sources(load_params(ROOT / "params.yaml").source):
        for path in local_files(entry["address"]):
            rows = read_rows(path, str(path))
            numbers[str(path)] = [number for number, row in rows if isinstance(row, dict) and belongs_to(row, user)]
    return {path: of_person for path, of_person in numbers.items() if of_person}


def _delete(cluster: Cluster, data: PersonalData) -> None:
    """The runs that no version in use comes from, as `dpo gc` deletes runs, and their files in MLflow."""
    in_use = data.in_use()
    runs = frozenset(data.runs) - data.runs_in_use()
    for registered in data.versions:
        if registered in in_use:
            registered.model.tag(registered.version, {"forgotten": "waits for another champion"})
        elif registered.aliases:
            with registered.model.exclusively() as held:
                registered.model.move(Moves(dict.fromkeys(registered.aliases)), held)
    if runs:
        ids = [path for name in sorted(runs) for path in (records.runs_folder() / name).glob("*run.json")]
        run_ids = [read_json_or_empty(path).get("run_id") for path in ids]  # read now: gc deletes the folders
        gc.delete_garbage(forgotten=runs)
        client = open_client(cluster)
        for run_id in filter(None, run_ids):
            artifact_store.delete_all(client, run_id)
    for folder in ("blame", "registry"):  # texts of pairs, and copies of versions
        shutil.rmtree(ROOT / ".scratch" / folder, ignore_errors=True)


def _certify(user: str, events: int, before: PersonalData, after: PersonalData) -> Path:
    """A record that names the person by a hash alone, with the hashes of what is gone and of what is in use."""
    manifest = read_json_or_empty(ROOT / MODEL / "manifest.json")  # `dpo reproduce` computes these hashes again
    remaining = {version.name for version in after.versions}
    content = {
        "user_sha256": hashlib.sha256(user.encode()).hexdigest(),
        "time": records.timestamp(),
        "feedback_events": events,
        "deleted_runs": sorted(before.runs.keys() - after.runs.keys()),
        "deleted_versions": [version.name for version in before.versions if version.name not in remaining],
        "left": {"files": after.sources, "runs": after.runs, "elsewhere": after.elsewhere},
        "complete": after.is_empty(),
        "model_here": {name: manifest.get(name) for name in ("data", "reference", "policy", "files")},
    }
    path = ROOT / ".scratch" / "forget" / f"{content['time']}.json"
    write_json(path, content)
    return path


def _description(data: PersonalData) -> list[str]:
    lines = [f"{path}: rows {_listed(rows)}" for path, rows in data.sources.items()]
    lines += [f"run {name}: {count} rows" for name, count in data.runs.items()]
    lines += [f"{name}: {count} rows" for name, count in data.elsewhere.items()]
    lines += [" ".join(["version", version.name, *version.aliases]) for version in data.versions]
    return ["Rows of this person, and what was made from them:", *(f"  {line}" for line in lines or ["none"])]


def _next_steps(data: PersonalData) -> list[str]:
    """What keeps the person's rows in use, and what to do about it."""
    steps = [f"Delete the rows {_listed(rows)} of {path}." for path, rows in data.sources.items()]
    steps += [
        f"{version.name} is {' and '.join(version.aliases)} and stays until another is. Start a run with the recipe "
        f"and overrides of {version.run}: it trains without these rows, and its model must pass the gate."
        for version in data.in_use()
    ]
    if data.elsewhere:
        steps.append(f"{', '.join(data.elsewhere)} still has the rows: `dpo run`, and commit dvc.lock if you track it.")
    if undeleted := sorted(data.runs.keys() - data.runs_in_use()):
        steps.append(f"These runs could not be deleted: {', '.join(undeleted)}. The notes above say why.")
    if not steps:
        return []
    numbered = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    end = "Then run `dpo forget` again. DVC remotes and Prefect's pages are not searched."
    return ["\nStill to do:", *numbered, end]


def _listed(numbers: list[int]) -> str:
    rest = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + rest
