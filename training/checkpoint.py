"""Checkpoints that are whole or not there: written aside, hashed, synced, renamed; verified before they are used.

DeepSpeed unpickles a checkpoint, which runs whatever code its files name. So a key authenticates the manifest of hashes
(HMAC-SHA256): whoever can write the folder but does not hold the key can make no checkpoint that is read.
"""

import hashlib
import hmac
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

TAG = "state"
MANIFEST, MAC = "manifest.json", "manifest.mac"
START = "start"  # below a training's folder: the checkpoint of another training that this one continues


def claim(folder: Path, attempt: str) -> None:
    """Make this attempt the only one that may publish into the folder: a worker left over from a killed run may not."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "attempt", attempt)


def taken_over(folder: Path, attempt: str) -> bool:
    try:
        return (folder / "attempt").read_text() not in ("", attempt)
    except OSError:  # storage that does not answer is no newer run
        return False


def save(
    engine: Any,
    folder: Path,
    attempt: str,
    step: int,
    state: dict[str, Any],
    keep: int,
    best: Collection[int],
    key: bytes,
    tensors: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:
    """Write a checkpoint with `state`, which is plain JSON; keep the newest ones and those of the steps in `best`.

    A collective: every rank writes its part, rank 0 publishes the whole. `tensors` are whole on rank 0, by file.
    """
    aside = folder / f".step-{step:08d}.{attempt}"
    engine.save_checkpoint(str(aside), tag=TAG, exclude_frozen_parameters=True)
    dist.barrier()
    if dist.get_rank() == 0:
        client = {"step": step, "world": dist.get_world_size(), "zero": engine.zero_optimization_stage(), **state}
        (aside / "state.json").write_text(json.dumps(client))
        for name, content in (tensors or {}).items():
            save_file(content, aside / name)
        _publish(aside, folder, attempt, step, keep, best, key)
    dist.barrier()


def adopt(source: Path, folder: Path) -> None:
    """Make another training's checkpoint the start of the training in `folder`.

    Hard links where the disk has them: the other training may delete its own, and nothing is stored twice.
    """
    aside, target = folder / f".{START}", folder / START
    for left in (aside, target):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(source, aside / f"step-{read_state(source)['step']:08d}", copy_function=_link)
    os.rename(aside, target)


def read_state(path: Path) -> dict[str, Any]:
    """The state that a checkpoint was saved with; empty where there is none."""
    try:
        return json.loads((path / "state.json").read_text())
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True)
class Found:
    """A whole checkpoint, and what DeepSpeed is to load: itself, or its universal form where the ranks have changed."""

    path: Path
    state: dict[str, Any]
    universal: bool
    own: bool  # of this training, and not the one that it continues
    origin: Path  # the checkpoint itself


def find(folder: Path, zero_stage: int, key: bytes) -> Found | None:
    """The newest whole checkpoint, the same on all ranks; converted where another group made it. A collective.

    ValueError on all ranks where DeepSpeed has no conversion.
    """
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        own = next(whole_checkpoints(folder, key), None)
        newest = own or next(whole_checkpoints(folder / START, key), None)
        if newest:
            state = read_state(newest)
            universal = (state["world"], state["zero"]) != (dist.get_world_size(), zero_stage)
            convert = universal and _convertible(state["zero"], zero_stage)
            path = _universal(newest) if convert else newest
            found = [Found(path, state, universal, own is not None, newest)]
        elif (folder / START).exists():  # step 0 would be another training
            found = [ValueError(f"the checkpoint in {folder / START} is damaged: start the training again")]
    dist.broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    if found[0] and not _convertible(saved := found[0].state["zero"], zero_stage):
        raise ValueError(
            f"the checkpoint {found[0].path} was saved under ZeRO-{saved}, and actor_train.zero_stage in "
            f"infra/cluster.yaml is {zero_stage}: DeepSpeed converts no checkpoint between ZeRO-3 and ZeRO 1 or 2. Set "
            f"zero_stage to {saved}, or train.resume_from_checkpoint to never to start again"
        )
    return found[0]


def _convertible(saved: int, wanted: int) -> bool:
    return (saved == 3) == (wanted == 3)


def load(engine: Any, found: Found) -> None:
    path, _ = engine.load_checkpoint(str(found.path), tag=TAG, load_module_strict=False)
    assert path is not None, f"DeepSpeed found nothing to load in {found.path}"
    if found.universal:
        dist.barrier()  # all have read it
        if dist.get_rank() == 0:
            shutil.rmtree(found.path)


def _universal(path: Path) -> Path:
    """DeepSpeed's form of a checkpoint that any number of ranks can load."""
    target = path.with_name(f".universal-{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    places = ["--input_folder", str(path / TAG), "--output_folder", str(target / TAG)]
    done = subprocess.run([*command, *places], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{path} could not be converted for another number of workers: {done.stderr[-2000:]}")
    return target


def whole_checkpoints(folder: Path, key: bytes) -> Any:
    """Verified checkpoints, newest first; a damaged one is named and passed over."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        damage = find_damage(path, key)
        if damage is None:
            yield path
        else:
            print(f"warning: checkpoint {path} is not used ({damage}); using the one before it", file=sys.stderr)


def find_damage(path: Path, key: bytes) -> str | None:
    """Why a checkpoint must not be loaded; None where the holder of the key made it and nothing has changed."""
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
    there = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
    if strange := sorted(there - files.keys() - {MANIFEST, MAC}):  # DeepSpeed unpickles what it finds
        return f"{strange[0]} is not of this checkpoint"
    return None


def mac_of(manifest: bytes, key: bytes) -> str:
    return hmac.new(key, manifest, hashlib.sha256).hexdigest()


def _publish(aside: Path, folder: Path, attempt: str, step: int, keep: int, best: Collection[int], key: bytes) -> None:
    if (folder / "attempt").read_text() != attempt:
        raise RuntimeError(f"a newer run has taken over {folder}; this one stops without writing")
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    manifest = {"step": step, "files": {str(path.relative_to(aside)): sha256(path) for path in files}}
    content = json.dumps(manifest, indent=1)
    write_atomically(aside / MANIFEST, content)
    write_atomically(aside / MAC, mac_of(content.encode(), key) + "\n")
    target = folder / f"step-{step:08d}"
    shutil.rmtree(target, ignore_errors=True)
    os.rename(aside, target)
    _sync(folder)
    ranked = {f"step-{number:08d}" for number in best}
    for old in sorted(folder.glob("step-*"))[:-keep]:
        if old.name not in ranked:
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


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(source, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
