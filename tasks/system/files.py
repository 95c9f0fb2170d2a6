"""Atomic writes of files and folders, and content hashes."""

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tasks.config.paths import main_checkout
from tasks.system.processes import start_time


@contextmanager
def publish(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` atomically, synced to disk, when the block succeeds."""
    target = Path(folder)
    for old in target.parent.glob(f".{target.name}.*.old"):
        if not target.exists():  # a process was killed between the two renames below
            os.rename(old, target)
    aside = _aside(target)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in aside.rglob("*"):
            if not path.is_symlink():
                sync(path)
        old = target.with_name(f"{aside.name}.old")
        if target.exists():  # renamed, not deleted: a kill here loses neither
            os.rename(target, old)
        os.rename(aside, target)
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` for a file to rename; deleted on failure, and by the next writer after a kill."""
    aside = _aside(path)
    try:
        yield aside
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file atomically, also across a kill or power failure: to a temporary file, synced, renamed.

    Nobody can open it with other rights than `mode` at any moment; the umask applies.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary(path) as aside:
        with open(aside, "w", opener=partial(os.open, mode=mode)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    sync(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def json_lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def sync(path: Path) -> None:
    """Write to disk what the kernel still caches: a file's content, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    """The temporary path of a file or folder. Removes those of killed processes of this host."""
    host = re.sub(r"[^\w-]", "-", socket.gethostname())
    for leftover in path.parent.glob(f".{path.name}.{host}.*"):
        pid, _, start = leftover.name.split(f".{host}.")[-1].removesuffix(".old").partition(".")
        if pid.isdecimal() and str(start_time(int(pid))) != start:
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{host}.{os.getpid()}.{start_time(os.getpid())}")


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text())


def read_json_lines(path: str | Path) -> list[Any]:
    """One value a line. A text may contain other line separators of Unicode, so `splitlines` would be wrong."""
    return [json.loads(line) for line in Path(path).read_text().split("\n") if line]


def read_json_or_empty(path: str | Path) -> dict[str, Any]:
    """A JSON object that can be recomputed: empty where the file is missing or damaged."""
    try:
        content = read_json(path)
    except (FileNotFoundError, ValueError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        return {}
    return content if isinstance(content, dict) else {}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_sha256(path: Path) -> str:
    """sha256 of a file that may be large: cached while its size, inode and times of change stay the same.

    An edit can reset the modification time, but not the time of the last status change.
    """
    cache = main_checkout() / ".scratch" / "hashes.json"
    known = read_json_or_empty(cache)
    state = path.stat()
    current = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    entry = known.get(str(path.resolve()))
    if not isinstance(entry, list) or entry[:-1] != current:
        entry = [*current, sha256(path)]
        write_json(cache, {**known, str(path.resolve()): entry})
    return entry[-1]


def fingerprint(content: Any) -> str:
    """A short content hash of everything that determines a result."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def hash_files(folder: Path) -> dict[str, str]:
    """sha256 of each file below the folder, by its relative name, in a fixed order."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in paths}
