"""Atomic checkpoints: written to a temporary folder, hashed, synced and renamed, and verified before use.

Files are written in the background (background_writer.py). Each rank leaves the hashes of its files in the temporary
folder, and rank 0 renames it when all have: no collective runs beside training's own. checkpoint_files.py authenticates
them.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from training.trainer.background_writer import BackgroundWriter
from training.trainer.checkpoint_files import (
    MAC,
    MANIFEST,
    START,
    mac_of,
    read_state,
    sha256,
    sync,
    whole_checkpoints,
    write_atomically,
)
from training.trainer.settings import Settings

TAG = "state"
PART = ".part-"  # files in the temporary folder: the hashes of what each rank has written


def save(
    engine: Any,
    writer: BackgroundWriter,
    folder: Path,
    attempt: str,
    step: int,
    state: dict[str, Any],
    keep: int,
    best: Collection[int],
    key: bytes,
    tensors: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:
    """Write a checkpoint with `state`, which is plain JSON; keep the newest `keep` and those of the steps in `best`.

    A collective that returns when every rank has copied its part to host memory, or has written it where that has no
    room. `tensors`, by file, are complete on rank 0. The writer has the errors of the rest.
    """
    writer.wait()
    temporary = folder / f".step-{step:08d}.{attempt}"
    world, rank = dist.get_world_size(), dist.get_rank()
    files: dict[str, Any] = {}
    engine.checkpoint_engine.save = lambda state_dict, path: files.update({path: state_dict})
    if rank == 0:  # DeepSpeed lets the other ranks wait for rank 0 first
        shutil.rmtree(temporary, ignore_errors=True)  # of workers that died while they wrote it
    engine.save_checkpoint(str(temporary), tag=TAG, exclude_frozen_parameters=True)
    if rank == 0:
        sizes = {"world": world, "zero": engine.zero_optimization_stage(), "tensor": engine.mp_world_size}
        client = {"step": step, **sizes, **state}
        (temporary / "state.json").write_text(json.dumps(client))
    paths, copied = [Path(path) for path in files], writer.copy(files)
    if copied is None:
        _write(files)
    files.clear()  # some of it may be copies in the device's memory

    def write() -> None:
        _write(copied or {})
        if rank == 0:
            for name, content in (tensors or {}).items():
                save_file(content, temporary / name)
        small = (path for path in temporary.rglob("*") if path.is_file() and rank == 0 and not _is_part(path))
        own = {*paths, *small}
        write_atomically(temporary / f"{PART}{rank}.json", json.dumps(_hashes(temporary, own)))
        if rank == 0:
            hashes = _hashes_of_all(temporary, folder, attempt, world)
            _publish(temporary, folder, attempt, step, hashes, keep, best, key)

    writer.start(write)


def _write(files: Mapping[str, Any]) -> None:
    for path, content in files.items():
        torch.save(content, path)


def _is_part(path: Path) -> bool:
    """Whether a rank writes this file in the background, or leaves its hashes in it."""
    return path.suffix == ".pt" or PART in path.name


def _hashes(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """The hash of each file, once it is on the disk."""
    for path in files:
        sync(path)
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def _hashes_of_all(temporary: Path, folder: Path, attempt: str, world: int) -> dict[str, str]:
    """Wait until every rank has written its files; their hashes."""
    parts = [temporary / f"{PART}{rank}.json" for rank in range(world)]
    while not all(part.exists() for part in parts):
        _check_attempt(folder, attempt)
        time.sleep(0.2)
    hashes = {name: digest for part in parts for name, digest in json.loads(part.read_text()).items()}
    for part in parts:
        part.unlink()
    return hashes


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, and the folder that DeepSpeed loads: itself, or its universal form for other ranks."""

    path: Path
    state: dict[str, Any]
    load_path: Path
    universal: bool  # whether load_path is the universal form
    own: bool  # False: made by the training that this one continues


def find(folder: Path, settings: Settings, key: bytes) -> Checkpoint | None:
    """The newest verified checkpoint, the same on all ranks; converted if other ranks or another ZeRO stage made it.

    ValueError on all ranks if DeepSpeed has no conversion, or if a training to continue has no intact checkpoint. A
    collective.
    """
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        own = next(whole_checkpoints(folder, key), None)
        newest = own or next(whole_checkpoints(folder / START, key), None)
        if newest:
            state = read_state(newest)
            universal = (state["world"], state["zero"]) != (dist.get_world_size(), settings.zero_stage)
            convert = universal and not _mismatch(newest, state, settings)
            load_path = _convert_to_universal(newest) if convert else newest
            shared = [Checkpoint(newest, state, load_path, universal, own is not None)]
        elif (folder / START).exists():  # starting at step 0 would be another training
            shared = [ValueError(f"the checkpoint in {folder / START} is damaged: start the training again")]
    dist.broadcast_object_list(shared)
    (checkpoint,) = shared
    if isinstance(checkpoint, Exception):
        raise checkpoint
    if checkpoint and (problem := _mismatch(checkpoint.path, checkpoint.state, settings)):
        raise ValueError(f"{problem}, or train.resume_from_checkpoint to never to start again")
    return checkpoint


def _mismatch(path: Path, state: Mapping[str, Any], settings: Settings) -> str | None:
    """Why this training cannot load a checkpoint, and what to set; None if it can, or after a conversion."""
    world, zero, tensor = state["world"], state["zero"], state.get("tensor", 1)
    zero_stage, tensor_parallel = settings.zero_stage, settings.tensor_parallel
    saved, wanted = (world, zero, tensor), (dist.get_world_size(), zero_stage, tensor_parallel)
    optimizer = state.get("optimizer", "adamw")
    if (optimizer == "muon") != (settings.optimizer == "muon"):
        return (
            f"the checkpoint {path} contains the state of {optimizer}, and train.optimizer is {settings.optimizer}: "
            f"set train.optimizer to {optimizer}"
        )
    if optimizer == "muon" and saved != wanted:
        return (
            f"the checkpoint {path} contains the parts of {world} workers under ZeRO-{zero}, and this training has "
            f"{wanted[0]} workers under ZeRO-{zero_stage}: DeepSpeed cannot convert the state of muon. Set num_workers "
            "and zero_stage of actor_train in infra/cluster.yaml to the checkpoint's values"
        )
    if saved != wanted and max(tensor, tensor_parallel) > 1:
        return (
            f"the checkpoint {path} contains the parts of {world} workers under ZeRO-{zero} with tensor_parallel "
            f"{tensor}, and this training has {wanted[0]} workers under ZeRO-{zero_stage} with tensor_parallel "
            f"{tensor_parallel}: split layers cannot be converted. Set num_workers, zero_stage and tensor_parallel of "
            "actor_train in infra/cluster.yaml to the checkpoint's values"
        )
    if (zero == 3) != (zero_stage == 3):
        return (
            f"the checkpoint {path} was saved under ZeRO-{zero}, and actor_train.zero_stage in infra/cluster.yaml is "
            f"{zero_stage}: DeepSpeed cannot convert a checkpoint between ZeRO-3 and ZeRO-1 or ZeRO-2. Set zero_stage "
            f"to {zero}"
        )
    return None


def load(engine: Any, checkpoint: Checkpoint) -> None:
    path, _ = engine.load_checkpoint(str(checkpoint.load_path), tag=TAG, load_module_strict=False)
    assert path is not None, f"DeepSpeed found nothing to load in {checkpoint.load_path}"
    if checkpoint.universal:
        if hasattr(engine.optimizer.optimizer, "compress"):
            engine.optimizer.optimizer.compress()
        dist.barrier()  # all ranks have read it
        if dist.get_rank() == 0:
            shutil.rmtree(checkpoint.load_path)


def _convert_to_universal(path: Path) -> Path:
    """DeepSpeed's form of a checkpoint that any number of ranks can load."""
    target = path.with_name(f".universal-{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(path / TAG), "--output_folder", str(target / TAG)]
    done = subprocess.run([*command, *folders], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"DeepSpeed could not convert {path} for another number of workers: {done.stderr[-2000:]}")
    return target


def _publish(
    temporary: Path,
    folder: Path,
    attempt: str,
    step: int,
    hashes: Mapping[str, str],
    keep: int,
    best: Collection[int],
    key: bytes,
) -> None:
    _check_attempt(folder, attempt)
    content = json.dumps({"step": step, "files": dict(sorted(hashes.items()))}, indent=1)
    write_atomically(temporary / MANIFEST, content)
    write_atomically(temporary / MAC, mac_of(content.encode(), key) + "\n")
    target = folder / f"step-{step:08d}"
    shutil.rmtree(target, ignore_errors=True)
    os.rename(temporary, target)
    sync(folder)
    best_names = {f"step-{number:08d}" for number in best}
    for old in sorted(folder.glob("step-*"))[:-keep]:
        if old.name not in best_names:
            shutil.rmtree(old)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)


def _check_attempt(folder: Path, attempt: str) -> None:
    if (folder / "attempt").read_text() != attempt:
        raise RuntimeError(f"a newer run has taken over {folder}; this one stops without writing")
