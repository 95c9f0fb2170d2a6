"""Checkpoints that are whole or not there: written aside, hashed, synced, renamed; verified before they are used."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

TAG = "state"


def claim(folder: Path, attempt: str) -> None:
    """Make this attempt the only one that may publish into the folder: a worker left over from a killed run may not."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "attempt", attempt)


def save(engine: Any, folder: Path, attempt: str, step: int, state: dict[str, Any], keep: int) -> None:
    """A collective: every rank writes its part, rank 0 publishes the whole."""
    aside = folder / f".step-{step:08d}.{attempt}"
    client = {"step": step, **state}
    engine.save_checkpoint(str(aside), tag=TAG, client_state=client, exclude_frozen_parameters=True)
    dist.barrier()
    if dist.get_rank() == 0:
        _publish(aside, folder, attempt, step, keep)
    dist.barrier()


def load(engine: Any, folder: Path) -> dict[str, Any] | None:
    """Load the newest whole checkpoint; its state, or None where there is none."""
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        newest = next(whole_checkpoints(folder), None)
        found = [str(newest) if newest else None]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return None
    path, state = engine.load_checkpoint(found[0], tag=TAG, load_module_strict=False)
    assert path is not None, f"DeepSpeed found nothing to load in {found[0]}"
    return state


def whole_checkpoints(folder: Path) -> Any:
    """Verified checkpoints, newest first; a damaged one is named and passed over."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        damage = find_damage(path)
        if damage is None:
            yield path
        else:
            print(f"warning: checkpoint {path} is damaged ({damage}); using the one before it", file=sys.stderr)


def find_damage(path: Path) -> str | None:
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError):
        return "its manifest is missing or unreadable"
    for name, digest in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if sha256(path / name) != digest:
            return f"{name} has changed"
    return None


def _publish(aside: Path, folder: Path, attempt: str, step: int, keep: int) -> None:
    if (folder / "attempt").read_text() != attempt:
        raise RuntimeError(f"a newer run has taken over {folder}; this one stops without writing")
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    manifest = {"step": step, "files": {str(path.relative_to(aside)): sha256(path) for path in files}}
    write_atomically(aside / "manifest.json", json.dumps(manifest, indent=1))
    target = folder / f"step-{step:08d}"
    shutil.rmtree(target, ignore_errors=True)
    os.rename(aside, target)
    _sync(folder)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)
    for left in folder.glob(".step-*"):
        shutil.rmtree(left)


def write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    _sync(aside)
    os.replace(aside, path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
