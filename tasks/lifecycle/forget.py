"""`dpo forget --user X`: erase a person's feedback, and every run, data set and model that was made from their rows.

Training is deterministic, and the order of steps depends on the number of pairs. No checkpoint of a run that had the
rows therefore belongs to a run that never had them: the model is trained again from the start, and its hashes equal
those of a run without the rows. Earlier runs that never had the rows stay as they are.

The champion is never deleted. Where it was made from the rows, the command names what to do first; the same command
again deletes the old version once another is champion.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import load_params
from tasks.config.paths import MODEL, RAW, ROOT
from tasks.dataset.reading.fetch import data_sources, local_files
from tasks.dataset.reading.raw_rows import belongs_to, raw_sources, rows_of
from tasks.dataset.reading.readers import read_rows
from tasks.errors import UserError
from tasks.feedback import answer_cache, traces
from tasks.runs import commits, dvc, dvc_lock, gc, records
from tasks.runs.commits import git
from tasks.runs.retention import RegisteredVersion, Run, all_runs, registered_versions
from tasks.system.files import recall, write_json
from tasks.tracking import artifact_store
from tasks.tracking.mlflow_client import absolute_uri
from tasks.tracking.registry import CHALLENGER, PREVIOUS, Moves, open_client

EVERY = 10**9  # runs that `gc` keeps
SHOWN = 50  # row numbers of a file


@dataclass(frozen=True)
class Found:
    """Where a person's rows are."""

    sources: dict[str, list[int]]  # rows of the user's own files, by file
    runs: dict[str, int]  # rows in data/raw, by run
    elsewhere: dict[str, int]  # the same, by branch, tag or checkout
    versions: list[RegisteredVersion]  # made by these runs

    def in_use(self) -> list[RegisteredVersion]:
        """Versions behind an alias such as champion: they serve people until another takes the alias."""
        return [one for one in self.versions if set(one.aliases) - {PREVIOUS, CHALLENGER}]

    def is_empty(self) -> bool:
        return not (self.sources or self.runs or self.elsewhere)


def forget(user: str, yes: bool) -> None:
    os.environ["DPO_HOME"] = str(ROOT)
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


def find(cluster: Cluster, user: str) -> Found:
    runs = all_runs()
    by_data: dict[str, int] = {}  # several runs share one data set
    with_rows = {run.name: count for run in runs if (count := _count(_lock_of(run), user, by_data))}
    places = {ref: dvc_lock.parse_lock(commits.read_file(ref, "dvc.lock")) for ref in ("HEAD", *_refs())}
    elsewhere = {name: count for name, lock in places.items() if (count := _count(lock, user, by_data))}
    if (ROOT / RAW / "manifest.json").exists() and (count := _rows(ROOT, user)):
        elsewhere["data/raw of this checkout"] = count
    versions = [one for one in registered_versions(cluster, runs) if one.version.tags.get("run") in with_rows]
    return Found(_source_rows(user), with_rows, elsewhere, versions)


def _lock_of(run: Run) -> dict[str, dvc_lock.Entry]:
    if run.commit:
        return dvc_lock.parse_lock(commits.read_file(run.commit, "dvc.lock"))
    return dvc_lock.read_lock(Path(run.record.root)) if run.record else {}


def _refs() -> list[str]:
    refs = git(ROOT, "for-each-ref", "--format=%(refname)", "refs/heads", "refs/tags").splitlines()
    return [ref for ref in refs if not ref.startswith(f"{commits.BRANCHES}/")]


def _count(lock: dict[str, dvc_lock.Entry], user: str, known: dict[str, int]) -> int:
    """The person's rows in the data/raw that a dvc.lock names, read from DVC's cache."""
    md5 = dvc_lock.outs(lock.get("source", {})).get(str(RAW))
    if md5 and md5 not in known:
        with TemporaryDirectory() as folder:
            known[md5] = _rows(Path(folder), user) if _link(md5, Path(folder) / RAW) else 0
    return known[md5] if md5 else 0


def _link(md5: str, folder: Path) -> bool:
    """Make the folder of a hash with links into DVC's cache; False if the cache does not have all of it."""
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
    found: dict[str, list[int]] = {}
    for entry in data_sources(load_params(ROOT / "params.yaml").source):
        for path in local_files(entry["address"]):
            rows = read_rows(path, str(path))
            if numbers := [number for number, row in rows if isinstance(row, dict) and belongs_to(row, user)]:
                found[str(path)] = numbers
    return found


def _delete(cluster: Cluster, found: Found) -> None:
    """The runs that no version in use comes from, as `dpo gc` deletes runs, and their files in MLflow."""
    used = found.in_use()
    keep = {one.version.tags.get("run") for one in used}
    runs = frozenset(found.runs) - keep
    for one in found.versions:
        if one in used:
            one.model.tag(one.version, {"forgotten": "waits for another champion"})
        elif one.aliases:
            with one.model.exclusively() as held:
                one.model.move(Moves(dict.fromkeys(one.aliases)), held)
    if runs:
        run_ids = [run_id for name in sorted(runs) for run_id in _mlflow_runs(name)]  # gc deletes the folders
        gc.delete_garbage(EVERY, runs)
        client = open_client(absolute_uri(cluster.tracking_uri), None)
        for run_id in run_ids:
            artifact_store.delete_all(client, run_id)
    for folder in ("blame", "registry"):  # texts of pairs, and copies of versions
        shutil.rmtree(ROOT / ".scratch" / folder, ignore_errors=True)


def _mlflow_runs(name: str) -> Iterator[str]:
    for path in (records.runs_folder() / name).glob("*run.json"):
        if run_id := recall(path).get("run_id"):
            yield str(run_id)


def _certify(user: str, events: int, before: Found, after: Found) -> Path:
    """A record that names the person by a hash alone, with the hashes of what is gone and of what is in use."""
    manifest = recall(ROOT / MODEL / "manifest.json")  # `dpo reproduce` computes these hashes again
    content = {
        "user_sha256": hashlib.sha256(user.encode()).hexdigest(),
        "time": records.timestamp(),
        "feedback_events": events,
        "deleted_runs": sorted(before.runs.keys() - after.runs.keys()),
        "deleted_versions": [_name(one) for one in before.versions if _name(one) not in map(_name, after.versions)],
        "left": {"files": after.sources, "runs": after.runs, "elsewhere": after.elsewhere},
        "complete": after.is_empty(),
        "model_here": {name: manifest.get(name) for name in ("data", "reference", "policy", "files")},
    }
    path = ROOT / ".scratch" / "forget" / f"{content['time']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return path


def _name(one: RegisteredVersion) -> str:
    return f"{one.model.name}/{one.version.number}"


def _description(found: Found) -> list[str]:
    lines = [f"{path}: rows {_listed(rows)}" for path, rows in found.sources.items()]
    lines += [f"run {name}: {count} rows" for name, count in found.runs.items()]
    lines += [f"{name}: {count} rows" for name, count in found.elsewhere.items()]
    lines += [" ".join(["version", _name(one), *one.aliases]) for one in found.versions]
    return ["Rows of this person, and what was made from them:", *(f"  {line}" for line in lines or ["none"])]


def _next_steps(found: Found) -> list[str]:
    """What keeps the person's rows in use, and what to do about it."""
    steps = [f"Delete the rows {_listed(rows)} of {path}." for path, rows in found.sources.items()]
    for one in found.in_use():
        run = one.version.tags.get("run")
        steps.append(
            f"{_name(one)} is {' and '.join(one.aliases)} and stays until another is. Start a run with the recipe and "
            f"overrides of {run}: it trains without these rows, and its model must pass the gate."
        )
    if found.elsewhere:
        steps.append(
            f"{', '.join(found.elsewhere)} still has the rows: `dpo run`, and commit dvc.lock if you track it."
        )
    if left := sorted(found.runs.keys() - {one.version.tags.get("run") for one in found.in_use()}):
        steps.append(f"These runs could not be deleted: {', '.join(left)}. The notes above say why.")
    if steps:
        steps = ["\nStill to do:", *(f"{number}. {step}" for number, step in enumerate(steps, 1))]
        steps.append("Then run `dpo forget` again. DVC remotes and Prefect's pages are not searched.")
    return steps


def _listed(numbers: list[int]) -> str:
    rest = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + rest
