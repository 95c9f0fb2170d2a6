"""The files of checkpoints, without torch: which attempt may publish them, and which are intact and authentic.

DeepSpeed unpickles a checkpoint, which can run any code. So a key authenticates the manifest of hashes (HMAC-SHA256):
a process that can write the folder but does not have the key cannot make a checkpoint that we load.
"""

import hashlib
import hmac
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST, MAC = "manifest.json", "manifest.mac"
START = "start"  # subfolder with the checkpoint of another training that this one continues


def claim(folder: Path, attempt: str) -> None:
    """Make this attempt the only one that may publish into the folder, so that a worker of a killed run cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "attempt", attempt)


def taken_over(folder: Path, attempt: str) -> bool:
    try:
        return (folder / "attempt").read_text() not in ("", attempt)
    except OSError:  # unavailable storage does not mean a newer run
        return False


def adopt(source: Path, folder: Path) -> None:
    """Make another training's checkpoint the start of the training in `folder`.

    Uses hard links where the disk has them: no file is stored twice, and the other training may delete its own.
    """
    temporary, target = folder / f".{START}", folder / START
    for leftover in (temporary, target):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(source, temporary / f"step-{read_state(source)['step']:08d}", copy_function=_link)
    os.rename(temporary, target)


def read_state(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; empty if there is none."""
    try:
        return json.loads((path / "state.json").read_text())
    except (OSError, ValueError):
        return {}


def whole_checkpoints(folder: Path, key: bytes) -> Iterator[Path]:
    """Verified checkpoints, newest first; skips damaged ones with a warning."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        damage = find_damage(path, key)
        if damage is None:
            yield path
        else:
            print(f"warning: checkpoint {path} is not used ({damage}); using the one before it", file=sys.stderr)


def find_damage(path: Path, key: bytes) -> str | None:
    """Why a checkpoint must not be loaded; None if it was made with the key and has not changed."""
    try:
        content = (path / MANIFEST).read_bytes()
        files = json.loads(content)["files"]
    except (OSError, ValueError, KeyError):
        return "its manifest is missing or unreadable"
    try:
        mac = (path / MAC).read_text().strip()
    except (OSError, ValueError):
        return f"it has no {MAC}: it was not made with the signing key"
    if not hmac.compare_digest(mac.encode(), mac_of(content, key).encode()):
        return f"its {MAC} was not made with the signing key"
    for name, digest in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if sha256(path / name) != digest:
            return f"{name} has changed"
    present = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
    if unknown := sorted(present - files.keys() - {MANIFEST, MAC}):  # DeepSpeed unpickles every file in the folder
        return f"{unknown[0]} does not belong to this checkpoint"
    return None


def mac_of(manifest: bytes, key: bytes) -> str:
    return hmac.new(key, manifest, hashlib.sha256).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    sync(temporary)
    os.replace(temporary, path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(source, target)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
