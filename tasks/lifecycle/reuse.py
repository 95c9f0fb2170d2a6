"""Reuse results of earlier runs: which entries of their dvc.lock files fit a workspace."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.config.paths import FINGERPRINT, ROOT
from tasks.config.source import Source
from tasks.config.strict import read_yaml
from tasks.runs import commits, dvc_lock
from tasks.runs.dvc_lock import Entry, StageInputs
from tasks.source import fingerprint

RECENT_RUNS = 50  # finished runs whose dvc.lock is searched


def earlier_locks() -> Iterator[dict[str, Entry]]:
    """The checkout's dvc.lock, then those of finished runs, newest first."""
    yield dvc_lock.read_lock(ROOT)
    for commit in islice(commits.finished_runs().values(), RECENT_RUNS):
        yield commits.lock_of(commit)


def fingerprint_output(params: Mapping[str, Any]) -> dict[str, str | None]:
    """The out of the stage `fingerprint` and its hash, as if the stage ran now with this content of params.yaml."""
    text = fingerprint.to_json(fingerprint.content_ids(Source.model_validate(params["source"])))
    return {str(FINGERPRINT): hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}


def fill_lock(root: Path) -> list[str]:
    """Add the fitting entries of earlier runs to a workspace's dvc.lock; the names of the stages that it changed.

    DVC checks each entry itself. So a wrong entry does no harm, and a missing one costs a stage that need not run
    (DVC's run cache leaves out stages whose outs persist).
    """
    earlier, before = list(earlier_locks()), dvc_lock.read_lock(root)
    entries, params = dict(before), read_yaml(root / "params.yaml")
    upstream = fingerprint_output(params)
    for name, stage in dvc_lock.stages(root).items():
        inputs = dvc_lock.current_inputs(root, stage, upstream, params)
        fitting = (lock[name] for lock in earlier if name in lock and dvc_lock.recorded_inputs(lock[name]) == inputs)
        if (entry := next(fitting, None)) is not None:
            entries[name] = entry
        upstream |= dvc_lock.outs(entry) if entry else dict.fromkeys(dvc_lock.out_paths(stage))
    changed = [name for name in entries if entries[name] != before.get(name)]
    if changed:
        dvc_lock.write_lock(root, entries)
    return changed


def input_hash(root: Path, name: str) -> str | None:
    """A hash of what a stage is about to compute, once the stages before it are done; None if an input is unknown."""
    lock = dvc_lock.read_lock(root)
    upstream: dict[str, str | None] = {}
    for earlier, stage in dvc_lock.stages(root).items():
        if earlier == name:
            inputs = dvc_lock.current_inputs(root, stage, upstream, read_yaml(root / "params.yaml"))
            return inputs.content_hash() if inputs.is_known() else None
        upstream |= dvc_lock.outs(lock.get(earlier, {}))
    return None


def fewest_differences(inputs: StageInputs, entries: Iterable[Entry]) -> list[str]:
    """What differs from the most similar entry; empty if there is no entry."""
    differences = [inputs.differences(dvc_lock.recorded_inputs(entry)) for entry in entries]
    return min(differences, key=len, default=[])
