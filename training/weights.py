"""A model's weights on disk, read and written tensor by tensor: a model of any size passes through little memory."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def locate(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor. Files beside them (a second format, an adapter) do not count."""
    if (folder / INDEX).exists():
        held: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in held.items()}
    if not (folder / SINGLE).exists():
        raise ValueError(f"there is neither {SINGLE} nor {INDEX} in {folder}")
    with safe_open(folder / SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its name, file by file."""
    files: dict[Path, list[str]] = {}
    for name, path in locate(folder).items():
        files.setdefault(path, []).append(name)
    for path, names in files.items():
        with safe_open(path, "pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


def write(tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_size: str) -> None:
    """Into files of `shard_size` at most (one tensor may be larger), named as transformers names them."""
    most, size = in_bytes(shard_size), 0
    shard: dict[str, Tensor] = {}
    shards: list[tuple[Path, dict[str, int]]] = []
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > most:
            shards.append(_save(shard, folder, len(shards)))
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        del tensor
    shards.append(_save(shard, folder, len(shards)))
    _name(shards, folder)


def _save(shard: dict[str, Tensor], folder: Path, number: int) -> tuple[Path, dict[str, int]]:
    path = folder / f"shard-{number}.safetensors"
    save_file(shard, path, metadata={"format": "pt"})
    return path, {name: tensor.nbytes for name, tensor in shard.items()}


def _name(shards: list[tuple[Path, dict[str, int]]], folder: Path) -> None:
    if len(shards) == 1:
        shards[0][0].rename(folder / SINGLE)
        return
    held: dict[str, str] = {}
    for number, (path, sizes) in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.rename(folder / name)
        held |= dict.fromkeys(sizes, name)
    total = sum(size for _, sizes in shards for size in sizes.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(held.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def in_bytes(size: str) -> int:
    """Of a size as export.max_shard_size writes it: 5GB, 500MB, 100KB."""
    return int(size[:-2]) * UNITS[size[-2:]]
