"""What a stage is made from, as DVC counts it: command, params, and the hash of each dependency.

DVC alone decides whether a stage runs. This is for what DVC has no word for: which earlier run's entry of dvc.lock a
new worktree starts with, that two runs do not compute the same at once, and why a stage would run (flows/plan.py).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flows import ROOT, commits
from tasks.configuration import read_yaml
from tasks.files import fingerprint, write_text
from tasks.paths import WATCH
from tasks.tracking.journal import flatten

Entry = dict[str, Any]  # of dvc.lock, for one stage
RECENT = 50  # runs whose entries are looked at
CHANGED_IN_PLACE = "the content behind an address of source changed"


@dataclass(frozen=True)
class Inputs:
    command: str
    params: Mapping[str, Any]  # flat
    deps: Mapping[str, str | None]  # None: not known before an earlier stage has run

    def known(self) -> bool:
        return None not in self.deps.values()

    def address(self) -> str:
        return fingerprint([self.command, dict(self.params), dict(self.deps)])

    def differences(self, then: "Inputs") -> list[str]:
        """From `then` to here, in words."""
        found = [] if self.command == then.command else [f"command {then.command} -> {self.command}"]
        for name in sorted({*self.params, *then.params}):
            before, after = (_shown(side.params, name) for side in (then, self))
            if before != after:
                found.append(f"param {name} {before} -> {after}")
        for path in sorted({*self.deps, *then.deps}):
            if self.deps.get(path) != then.deps.get(path):
                what = "code" if path.endswith(".py") else "data"
                found.append(CHANGED_IN_PLACE if path == str(WATCH) else f"{what} changed: {path}")
        return found


def stages(root: Path) -> dict[str, Entry]:
    """Those that run only when something changed: all but `watch`."""
    every = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
    return {name: stage for name, stage in every.items() if not stage.get("always_changed")}


def watched(content: Mapping[str, Any]) -> dict[str, str | None]:
    """The out of the stage `watch` with this content of params.yaml, as if it had run now."""
    from tasks.params import Source
    from tasks.watch import look, text

    found = text(look(Source.model_validate(content["source"])))
    return {str(WATCH): hashlib.md5(found.encode(), usedforsecurity=False).hexdigest()}


def read_lock(text: str | None) -> dict[str, Entry]:
    """Empty where there is none, or half of one that a killed DVC left."""
    try:
        return dict(yaml.safe_load(text or "")["stages"])
    except (yaml.YAMLError, TypeError, KeyError, ValueError):
        return {}


def lock_of(root: Path) -> dict[str, Entry]:
    path = root / "dvc.lock"
    return read_lock(path.read_text()) if path.exists() else {}


def recorded(entry: Entry) -> Inputs:
    """What an entry of dvc.lock (or of DVC's run cache) was made from."""
    params = {name: value for file in entry.get("params", {}).values() for name, value in file.items()}
    deps = {dep["path"]: dep.get("md5") for dep in entry.get("deps", [])}
    return Inputs(entry["cmd"], _flat(params), deps)


def current(root: Path, stage: Entry, upstream: Mapping[str, str | None], files: Mapping[str, Any]) -> Inputs:
    """Of a stage of dvc.yaml now; `upstream`: outs of earlier stages, `files`: what configuration files would hold."""
    params: dict[str, Any] = {}
    for name, keys in _param_keys(stage):
        content = files.get(name) or yaml.safe_load((root / name).read_text()) or {}
        params |= {key: _at(content, key) for key in keys}
    deps = {path: upstream[path] if path in upstream else _md5(root / path) for path in stage.get("deps", [])}
    return Inputs(stage["cmd"], _flat(params), deps)


def outs(entry: Entry) -> dict[str, str | None]:
    return {out["path"]: out.get("md5") for out in entry.get("outs", [])}


def out_paths(stage: Entry) -> list[str]:
    """Of a stage of dvc.yaml: outs, metrics and plots, each a path or {path: options}."""
    every = [out for kind in ("outs", "metrics", "plots") for out in stage.get(kind, [])]
    return [out if isinstance(out, str) else next(iter(out)) for out in every]


def locks() -> Iterator[dict[str, Entry]]:
    """The checkout's dvc.lock, then those of finished runs, newest first."""
    yield lock_of(ROOT)
    for name in commits.finished()[:RECENT]:
        yield read_lock(commits.show(commits.find(name) or "HEAD", "dvc.lock"))


def seed(root: Path) -> list[str]:
    """Give a workspace, for each stage, the entry of dvc.lock that fits it; the stages that have another one now.

    DVC looks at each entry itself: a wrong one costs nothing, a missing one costs a stage that need not run (DVC's run
    cache leaves out stages whose outs persist).
    """
    known = list(locks())
    before = lock_of(root)
    lock, upstream = dict(before), watched(read_yaml(root / "params.yaml"))
    for name, stage in stages(root).items():
        now = current(root, stage, upstream, {})
        fits = (one[name] for one in known if name in one and recorded(one[name]) == now)
        if (entry := next(fits, None)) is not None:
            lock[name] = entry
        upstream |= outs(entry) if entry else dict.fromkeys(out_paths(stage))
    new = [name for name in lock if lock[name] != before.get(name)]
    if new:
        content = {"schema": "2.0", "stages": lock}
        write_text(root / "dvc.lock", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return new


def address(root: Path, name: str) -> str | None:
    """Of what a stage is about to compute, once the stages before it are done; None where it cannot be told."""
    lock, every = lock_of(root), stages(root)
    upstream: dict[str, str | None] = {}
    for before in every:
        if before == name:
            break
        upstream |= outs(lock.get(before, {}))
    now = current(root, every[name], upstream, {})
    return now.address() if now.known() else None


def _param_keys(stage: Entry) -> Iterator[tuple[str, list[str]]]:
    """(file, keys): DVC takes a bare key as one of params.yaml."""
    for given in stage.get("params", []):
        if isinstance(given, str):
            yield "params.yaml", [given]
        else:
            yield from ((name, keys or []) for name, keys in given.items())


def _at(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _flat(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in flatten(params).items()}


def _number(value: Any) -> Any:
    """1e-06 is a number for DVC, which writes it so, and text for the reader here."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _shown(params: Mapping[str, Any], name: str) -> Any:
    return params.get(name, "nothing")


def _md5(path: Path) -> str | None:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() if path.is_file() else None


def closest(now: Inputs, entries: Iterable[Entry]) -> list[str] | None:
    """What is different from the entry that is nearest; None where the stage never ran."""
    found = [now.differences(recorded(entry)) for entry in entries]
    return min(found, key=len, default=None)
