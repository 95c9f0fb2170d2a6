"""Read and write model weights tensor by tensor, so that a model of any size needs little memory."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def locate(folder: Path) -> dict[str, Path]:
    """The file of each tensor. Ignores other files in the folder (another format, an adapter)."""
    if (folder / INDEX).exists():
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    if not (folder / SINGLE).exists():
        raise ValueError(f"there is neither {SINGLE} nor {INDEX} in {folder}")
    with safe_open(folder / SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of each tensor, from the headers alone. ValueError if a file or tensor is missing, or a file is cut."""
    try:
        index = json.loads((folder / INDEX).read_text())["weight_map"] if (folder / INDEX).exists() else {}
        files = sorted(set(index.values())) or [SINGLE]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} is damaged ({error!r}). Fetch it again") from None
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ValueError(
            f"{len(missing)} of its {len(files)} files of weights are missing, such as {missing[0]}. Fetch it again"
        )
    shapes = {name: shape for file in files for name, shape in _header(folder / file).items()}
    if absent := sorted(index.keys() - shapes.keys()):
        raise ValueError(
            f"{len(absent)} tensors that {INDEX} names are in no file, such as {absent[0]}. Fetch it again"
        )
    return shapes


def _header(path: Path) -> dict[str, list[int]]:
    """The shape of each tensor in a file. safetensors checks the header and the file's size."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no dict
    except SafetensorError as error:
        with path.open("rb") as start:
            is_pointer = start.read(8) == b"version "
        problem = f"is no safetensors file or was cut off ({error}). Fetch it again"
        pointer = "is a Git LFS pointer and holds no weights. Run `git lfs pull` in its folder"
        raise ValueError(f"{path.name} {pointer if is_pointer else problem}") from None


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
    """Write files of at most `shard_size` (5GB, 500MB) or one larger tensor, named as transformers does."""
    max_size, size = int(shard_size[:-2]) * UNITS[shard_size[-2:]], 0
    shard: dict[str, Tensor] = {}
    shards: list[tuple[Path, dict[str, int]]] = []
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_size:
            shards.append(_save(shard, folder, len(shards)))
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        del tensor
    shards.append(_save(shard, folder, len(shards)))
    _rename(shards, folder)


def _save(shard: dict[str, Tensor], folder: Path, number: int) -> tuple[Path, dict[str, int]]:
    path = folder / f"shard-{number}.safetensors"
    save_file(shard, path, metadata={"format": "pt"})
    return path, {name: tensor.nbytes for name, tensor in shard.items()}


def _rename(shards: list[tuple[Path, dict[str, int]]], folder: Path) -> None:
    if len(shards) == 1:
        shards[0][0].rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (path, sizes) in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.rename(folder / name)
        weight_map |= dict.fromkeys(sizes, name)
    total = sum(size for _, sizes in shards for size in sizes.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
