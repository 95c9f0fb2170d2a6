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
from training.trainer.settings import MOMENT_BYTES, Settings

TAG = "state"
DECAY = "matrices"  # the parameters with weight decay, which are groups of the optimizer apart from the others
PART = ".part-"  # files in the temporary folder: the hashes of what each rank has written


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint that a run writes into a temporary folder, and publishes when all ranks have written their files."""

    folder: Path  # of the training
    attempt: str
    step: int
    keep: int  # how many of the newest checkpoints stay in the folder
    best: Collection[int]  # steps whose checkpoints stay, too
    key: bytes

    @property
    def temporary(self) -> Path:
        return self.folder / f".step-{self.step:08d}.{self.attempt}"

    def check_attempt(self) -> None:
        if (self.folder / "attempt").read_text() != self.attempt:
            raise RuntimeError(f"a newer run has taken over {self.folder}; this one stops without writing")


def save(
    engine: Any,
    writer: BackgroundWriter,
    new: NewCheckpoint,
    state: dict[str, Any],
    tensors: Mapping[str, dict[str, Tensor]],
) -> None:
    """Write a checkpoint with `state`, which is plain JSON.

    A collective that returns when every rank has copied its part to host memory, or has written it where that has no
    room. `tensors`, by file, are complete on rank 0. The writer has the errors of the rest.
    """
    writer.wait()
    temporary, world, rank = new.temporary, dist.get_world_size(), dist.get_rank()
    files: dict[str, Any] = {}
    engine.checkpoint_engine.save = lambda state_dict, path: files.update({path: state_dict})
    if rank == 0:  # DeepSpeed lets the other ranks wait for rank 0 first
        shutil.rmtree(temporary, ignore_errors=True)  # of workers that died while they wrote it
    engine.save_checkpoint(str(temporary), tag=TAG, exclude_frozen_parameters=True)
    if rank == 0:
        sizes = {"world": world, "zero": engine.zero_optimization_stage(), "tensor": engine.mp_world_size}
        (temporary / "state.json").write_text(json.dumps({"step": new.step, **sizes, "decay": DECAY, **state}))
    paths, copied = [Path(path) for path in files], writer.copy(files)
    if copied is None:
        _write(files)
    files.clear()  # some of it may be copies in the device's memory

    def write() -> None:
        _write(copied or {})
        small: list[Path] = []
        if rank == 0:
            for name, content in tensors.items():
                save_file(content, temporary / name)
            small = [path for path in temporary.rglob("*") if path.is_file() and not _is_part(path)]
        write_atomically(temporary / f"{PART}{rank}.json", json.dumps(_hashes(temporary, {*paths, *small})))
        if rank == 0:
            _publish(new, _hashes_of_all(new, world))

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


def _hashes_of_all(new: NewCheckpoint, world: int) -> dict[str, str]:
    """Wait until every rank has written its files; their hashes."""
    parts = [new.temporary / f"{PART}{rank}.json" for rank in range(world)]
    while not all(part.exists() for part in parts):
        new.check_attempt()
        time.sleep(0.2)
    hashes = {name: digest for part in parts for name, digest in json.loads(part.read_text()).items()}
    for part in parts:
        part.unlink()
    return hashes


def _publish(new: NewCheckpoint, hashes: Mapping[str, str]) -> None:
    new.check_attempt()
    folder, temporary = new.folder, new.temporary
    content = json.dumps({"step": new.step, "files": dict(sorted(hashes.items()))}, indent=1)
    write_atomically(temporary / MANIFEST, content)
    write_atomically(temporary / MAC, mac_of(content.encode(), new.key) + "\n")
    target = folder / f"step-{new.step:08d}"
    shutil.rmtree(target, ignore_errors=True)
    os.rename(temporary, target)
    sync(folder)
    best_names = {f"step-{number:08d}" for number in new.best}
    for old in sorted(folder.glob("step-*"))[: -new.keep]:
        if old.name not in best_names:
            shutil.rmtree(old)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)


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
    result: list[Checkpoint | ValueError | None] = [None]
    if dist.get_rank() == 0:
        try:
            result = [_find(folder, settings, key)]
        except ValueError as error:
            result = [error]
    dist.broadcast_object_list(result)
    if isinstance(result[0], ValueError):
        raise result[0]
    return result[0]


def _find(folder: Path, settings: Settings, key: bytes) -> Checkpoint | None:
    own = next(whole_checkpoints(folder, key), None)
    newest = own or next(whole_checkpoints(folder / START, key), None)
    if newest is None and (folder / START).exists():  # starting at step 0 would be another training
        raise ValueError(f"the checkpoint in {folder / START} is damaged: start the training again")
    if newest is None:
        return None
    state = read_state(newest)
    _check_convertible(newest, state, settings)
    universal = (state["world"], state["zero"]) != (dist.get_world_size(), settings.zero_stage)
    load_path = _convert_to_universal(newest) if universal else newest
    return Checkpoint(newest, state, load_path, universal, own is not None)


def _check_convertible(path: Path, state: Mapping[str, Any], settings: Settings) -> None:
    """ValueError if this training cannot load a checkpoint, not even after a conversion: what to set."""
    start_again = "or train.resume_from_checkpoint to never to start again"
    if state.get("decay") != DECAY and _has_vectors(settings.adapter):
        raise ValueError(
            f"the checkpoint {path} was written when weight decay applied to biases and norms too, so that its "
            "optimizer has other parameter groups: set train.resume_from_checkpoint to never to start again"
        )
    if (optimizer := state.get("optimizer", "adamw")) not in MOMENT_BYTES:
        raise ValueError(
            f"the checkpoint {path} contains the state of the optimizer {optimizer}, which is gone: "
            "set train.resume_from_checkpoint to never to start again"
        )
    saved = (state["world"], state["zero"], state.get("tensor", 1))
    wanted = (dist.get_world_size(), settings.zero_stage, settings.tensor_parallel)
    if saved == wanted:
        return
    if max(saved[2], wanted[2]) > 1:
        part, keys = "split layers", "num_workers, zero_stage and tensor_parallel"
    elif (saved[1] == 3) != (wanted[1] == 3):
        part, keys = "between ZeRO-3 and ZeRO-1 or ZeRO-2", "zero_stage"
    else:
        return
    describe = "{} workers under ZeRO-{} with tensor_parallel {}".format
    raise ValueError(
        f"the checkpoint {path} is of {describe(*saved)}, and this training has {describe(*wanted)}: DeepSpeed cannot "
        f"convert {part}. Set {keys} of actor_train in infra/cluster.yaml to the checkpoint's values, {start_again}"
    )


def _has_vectors(adapter: Mapping[str, Any] | None) -> bool:
    """Whether biases or norms are trained; plain LoRA has matrices alone."""
    return adapter is None or bool(adapter.get("use_dora") or adapter.get("modules_to_save"))


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
