"""`source.data: run:NAME`: the rows of an earlier run, from DVC's cache, to replay a share of them.

NAME is a finished run, or a registered version (champion, MODEL/3), which means the run that made it. The rows are the
pairs that the run sampled, or the rows of its `source.data` if it sampled none.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from tasks.config.paths import RAW, SAMPLE
from tasks.errors import UserError
from tasks.runs import commits, dvc, dvc_lock
from tasks.system.files import read_json
from tasks.tracking.model_names import registered_version

PAIRS = "pairs.jsonl"  # in data/sample


def run_commit(key: str, name: str) -> str:
    """The commit of the run, which identifies its rows."""
    if commit := commits.find_commit(name):
        return commit
    with registered_version(name) as (_, _, version):
        run = version.tags.get("run", "")
    if commit := commits.find_commit(run):
        return commit
    raise UserError(
        f"{key}: the run '{run}', which made the version {name}, is not in this checkout. Name a run of it."
    )


def copy_rows(key: str, name: str, folder: Path) -> None:
    """Copy the files of rows into a folder."""
    lock = commits.lock_of(run_commit(key, name))
    outs = {path: md5 for entry in lock.values() for path, md5 in dvc_lock.outs(entry).items()}
    try:
        for path, cached in _rows(outs).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cached, folder / path)
    except (FileNotFoundError, KeyError):
        raise UserError(
            f"{key}: the rows of {name} are no longer in DVC's cache. `dpo open {name}` fetches them from DVC's remote."
        ) from None


def _rows(outs: Mapping[str, str | None]) -> dict[str, Path]:
    """The cached files of rows by name, from the outs of a run."""
    sampled = dvc.cached_files(sample) if (sample := outs.get(str(SAMPLE))) else {}
    if PAIRS in sampled:
        return {PAIRS: sampled[PAIRS]}
    raw = dvc.cached_files(outs[str(RAW)] or "")
    sources = [source for source in read_json(raw["manifest.json"])["sources"] if source["key"] == "source.data"]
    names = [f"{source['name']}/{file['file']}" for source in sources for file in source["files"]]
    return {name: raw[name] for name in names}
