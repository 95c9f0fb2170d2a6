"""Files that are whole or not there, and the hashes that name them."""

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from tasks.machines.process import began


def home() -> Path:
    """Where state that outlives a workspace is kept: the main checkout, also for a run in its own worktree."""
    return Path(os.environ.get("DPO_HOME", ".")).resolve()


@contextmanager
def publish(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder`, synced to disk, when the block ends well."""
    target = Path(folder)
    for before in target.parent.glob(f".{target.name}.*.old"):
        if not target.exists():  # a process was killed between the two renames below
            os.rename(before, target)
    aside = _aside(target)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in aside.rglob("*"):
            if not path.is_symlink():
                sync(path)
        before = target.with_name(f"{aside.name}.old")
        if target.exists():  # moved away and not deleted: a kill here loses neither
            os.rename(target, before)
        os.rename(aside, target)
        sync(target.parent)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or not there, also after a kill or a power failure: aside, synced, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    try:
        with aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def sync(path: Path) -> None:
    """To disk: a file's content, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    """Where a file or folder is made before it takes its name; what killed processes of this host left is removed."""
    host = re.sub(r"[^\w-]", "-", socket.gethostname())
    for left in path.parent.glob(f".{path.name}.{host}.*"):
        pid, _, start = left.name.split(f".{host}.")[-1].removesuffix(".old").partition(".")
        if pid.isdecimal() and str(began(int(pid))) != start:
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{host}.{os.getpid()}.{began(os.getpid())}")


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text())


def recall(path: str | Path) -> dict[str, Any]:
    """A JSON object that can be found out again: empty where the file is missing or damaged."""
    try:
        content = read_json(path)
    except (FileNotFoundError, ValueError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        return {}
    return content if isinstance(content, dict) else {}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_sha256(path: Path) -> str:
    """sha256 of a file that may be large: not read again while its size, inode and times of change are the same.

    Whoever edits a file can set its modification time back, but not the time of its last status change.
    """
    memory = home() / ".scratch" / "hashes.json"
    known = recall(memory)
    state = path.stat()
    now = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    entry = known.get(str(path.resolve()))
    if not isinstance(entry, list) or entry[:-1] != now:
        entry = [*now, sha256(path)]
        write_json(memory, {**known, str(path.resolve()): entry})
    return entry[-1]


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
