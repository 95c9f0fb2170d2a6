"""Files that are whole or not there, and the hashes that name them."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml


def home() -> Path:
    """Where state that outlives a workspace is kept: the main checkout, also for a run in its own worktree."""
    return Path(os.environ.get("DPO_HOME", ".")).resolve()


@contextmanager
def publish(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` when the block ends well."""
    target = Path(folder)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        yield aside
        shutil.rmtree(target, ignore_errors=True)
        os.rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    os.replace(aside, path)


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_sha256(path: Path) -> str:
    """sha256 of a file that may be large: not read again while its size and time of change are the same."""
    memory = home() / ".scratch" / "hashes.json"
    known = read_json(memory) if memory.exists() else {}
    state = path.stat()
    now = [state.st_size, state.st_mtime_ns]
    entry = known.get(str(path.resolve()))
    if entry is None or entry[:2] != now:
        entry = [*now, sha256(path)]
        write_json(memory, {**known, str(path.resolve()): entry})
    return entry[2]


def fingerprint(content: Any) -> str:
    """A short address made from everything that determines a result."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def hash_files(folder: Path) -> dict[str, str]:
    """sha256 of each file below the folder, by its relative name, in a fixed order."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in paths}


def stage_code(stage: str, prefix: str) -> dict[str, str]:
    """sha256 of the files that a stage imports, as dvc.yaml lists them, of those whose path begins with `prefix`."""
    root = Path(__file__).resolve().parents[1]
    listed = yaml.safe_load((root / "dvc.yaml").read_text())["stages"][stage]["deps"]
    return {name: sha256(root / name) for name in listed if name.startswith(prefix)}
