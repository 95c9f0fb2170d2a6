"""The formats of DVC's files: dvc.yaml, dvc.lock and the rwlock of a workspace.

DVC alone decides whether a stage runs. We read its files for what DVC has no command for: to reuse entries of earlier
runs (tasks/lifecycle/reuse.py), to explain why a stage would run (tasks/lifecycle/plan.py) and to recover from a kill.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from pydantic import BaseModel, Field

from tasks.config.paths import FINGERPRINT
from tasks.config.strict import parse_yaml
from tasks.system.files import fingerprint, write_text
from tasks.system.processes import is_running
from tasks.tracking.journal import flatten

Entry = dict[str, Any]  # a stage's part of dvc.lock
SOURCE_CHANGED = "the content behind an address of source changed"
CLOCK_TOLERANCE = 1.0  # seconds by which a process's start and a file's time may differ


class LockedFile(BaseModel):
    path: str
    hash: str = ""
    md5: str = Field("", min_length=3)
    size: int = 0
    nfiles: int = 0


class LockedStage(BaseModel):
    cmd: str | list[str]
    params: dict[str, dict[str, Any]] = {}
    deps: list[LockedFile] = []
    outs: list[LockedFile] = []


class LockFile(BaseModel):
    """A whole dvc.lock: DVC refuses anything else, where half a file can still be YAML."""

    version: Literal["2.0"] = Field(alias="schema")
    stages: dict[str, LockedStage] = {}


@dataclass(frozen=True)
class StageInputs:
    """What a stage is made from, as DVC counts it: command, params, and the hash of each dependency."""

    command: str
    params: Mapping[str, Any]  # by dotted name
    deps: Mapping[str, str | None]  # None: unknown before an earlier stage has run

    def is_known(self) -> bool:
        return None not in self.deps.values()

    def content_hash(self) -> str:
        return fingerprint([self.command, dict(self.params), dict(self.deps)])

    def differences(self, earlier: "StageInputs") -> list[str]:
        """What changed since `earlier`, in words."""
        reasons = [] if self.command == earlier.command else [f"command {earlier.command} -> {self.command}"]
        for name in sorted({*self.params, *earlier.params}):
            before, after = (inputs.params.get(name, "nothing") for inputs in (earlier, self))
            if before != after:
                reasons.append(f"param {name} {before} -> {after}")
        for path in sorted({*self.deps, *earlier.deps}):
            if self.deps.get(path) != earlier.deps.get(path):
                kind = "data" if path.startswith("data/") else "code"
                reasons.append(SOURCE_CHANGED if path == str(FINGERPRINT) else f"{kind} changed: {path}")
        return reasons


def stages(root: Path) -> dict[str, Entry]:
    """The stages of dvc.yaml that run only when something changed: all but `fingerprint`."""
    content = parse_yaml((root / "dvc.yaml").read_text())["stages"]
    return {name: stage for name, stage in content.items() if not stage.get("always_changed")}


def is_disabled(stage: str, params: Mapping[str, Any]) -> bool:
    """Whether the content of params.yaml leaves out an optional stage."""
    return stage in ("sample", "sft") and params.get(stage) is None


def out_paths(stage: Entry) -> list[str]:
    """The outs and metrics of a stage of dvc.yaml; each is a path or {path: options}."""
    outs = [*stage.get("outs", []), *stage.get("metrics", [])]
    return [out if isinstance(out, str) else next(iter(out)) for out in outs]


def current_inputs(
    root: Path, stage: Entry, upstream: Mapping[str, str | None], params: Mapping[str, Any]
) -> StageInputs:
    """The inputs of a stage of dvc.yaml with this content of params.yaml.

    `upstream` has the hashes of the outs of earlier stages, which need not be in the workspace.
    """
    values = {key: _at(params, key) for key in stage.get("params", [])}
    deps = {path: upstream[path] if path in upstream else dvc_hash(root / path) for path in stage.get("deps", [])}
    return StageInputs(stage["cmd"], _flat(values), deps)


def recorded_inputs(entry: Entry) -> StageInputs:
    """The inputs from which the outputs of an entry were made."""
    params = {name: value for file in entry.get("params", {}).values() for name, value in file.items()}
    deps = {dep["path"]: dep.get("md5") for dep in entry.get("deps", [])}
    return StageInputs(entry["cmd"], _flat(params), deps)


def outs(entry: Entry) -> dict[str, str | None]:
    return {out["path"]: out.get("md5") for out in entry.get("outs", [])}


def artifacts_size(lock: Mapping[str, Entry]) -> int:
    """Bytes of the artifacts that a dvc.lock names; runs share those that are equal."""
    return sum(out.get("size", 0) for entry in lock.values() for out in entry.get("outs", []))


def parse_lock(text: str) -> dict[str, Entry]:
    """The entries of a dvc.lock; empty if the text is empty, or is the half that a killed DVC left."""
    try:
        return dict(parse_yaml(text)["stages"])
    except (yaml.YAMLError, TypeError, KeyError, ValueError):
        return {}


def read_lock(root: Path) -> dict[str, Entry]:
    path = root / "dvc.lock"
    return parse_lock(path.read_text()) if path.exists() else {}


def write_lock(root: Path, entries: Mapping[str, Entry]) -> None:
    content = {"schema": "2.0", "stages": dict(entries)}
    write_text(root / "dvc.lock", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def is_lock_damaged(workspace: Path) -> bool:
    """Whether dvc.lock is half a file: DVC writes it in place."""
    path = workspace / "dvc.lock"
    if not path.exists():
        return False
    try:
        LockFile.model_validate(parse_yaml(path.read_text()), strict=True)
    except (yaml.YAMLError, ValueError):
        return True
    return False


def set_lock_aside(workspace: Path) -> None:
    """Move a damaged dvc.lock away: DVC restores the results of its stages from its run cache."""
    target = workspace / ".scratch" / "dvc.lock.damaged"
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(workspace / "dvc.lock", target)


def rwlock(workspace: Path) -> Path:
    return workspace / ".dvc" / "tmp" / "rwlock"


def rwlock_holders(workspace: Path) -> tuple[set[int], set[int]]:
    """The ids of processes in DVC's rwlock: those that run, and those that are gone ({0} if the file is damaged).

    DVC asks only whether the id is in use. It waits for ever if another process has got the id since.
    """
    path = rwlock(workspace)
    try:
        content = json.loads(path.read_text())
        holders = [*content.get("write", {}).values(), *chain.from_iterable(content.get("read", {}).values())]
        pids = {int(holder["pid"]) for holder in holders}
        gone = {pid for pid in pids if not _is_older(pid, path.stat().st_mtime)}
    except FileNotFoundError:
        return set(), set()
    except (ValueError, AttributeError, TypeError, KeyError):
        return set(), {0}
    return pids - gone, gone


def _is_older(pid: int, written: float) -> bool:
    """Whether the process with this id already ran when the lock was written."""
    try:
        process = psutil.Process(pid)
        return is_running(process) and process.create_time() <= written + CLOCK_TOLERANCE
    except psutil.NoSuchProcess:
        return False


def _at(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _flat(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in flatten(params).items()}


def _number(value: Any) -> Any:
    """DVC writes the number 1e-06 in a form that our YAML reader takes for text."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def dvc_hash(path: Path) -> str | None:
    """The hash that DVC gives a file, or a folder of code; None if there is none."""
    if path.is_file():
        return _hex(path.read_bytes())
    if not path.is_dir():
        return None
    files = [
        {"md5": _hex(file.read_bytes()), "relpath": file.relative_to(path).as_posix()} for file in _code_files(path)
    ]
    return _hex(json.dumps(files).encode()) + ".dir"


def _code_files(folder: Path) -> list[Path]:
    """The files of a folder without what Python compiled, as .dvcignore leaves it out."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _hex(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
