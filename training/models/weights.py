"""Read and write model weights tensor by tensor, so that a model of any size needs little memory."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.models.model_files import INDEX, SINGLE, read_index, weight_files

STORED = {  # the names of types in safetensors' headers
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def locate(folder: Path) -> dict[str, Path]:
    """The file of each tensor. Like transformers, takes all tensors of the files: the index only names the files."""
    return {name: path for path in _files(folder) for name in _names(path)}


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Each tensor on the meta device. ValueError if a file or tensor is missing, or a file is cut or no safetensors."""
    headers: dict[str, Tensor] = {}
    for path in _files(folder):
        header = _header(path)
        if twice := sorted(header.keys() & headers.keys()):
            raise ValueError(f"the tensor {twice[0]} is in two of its files of weights. Fetch the model again")
        headers |= header
    index = {} if (folder / SINGLE).is_file() else read_index(folder)
    if absent := sorted(index.keys() - headers.keys()):
        raise ValueError(
            f"{len(absent)} tensors that {INDEX} names are in no file, such as {absent[0]}. Fetch it again"
        )
    return headers


def _files(folder: Path) -> list[Path]:
    if files := weight_files(folder):
        return [folder / name for name in files]
    raise ValueError(f"there is neither {SINGLE} nor {INDEX} in {folder}")


def _names(path: Path) -> list[str]:
    with safe_open(path, "np") as file:
        return list(file.keys())


def _header(path: Path) -> dict[str, Tensor]:
    """safetensors checks the header and the file's size."""
    try:
        with safe_open(path, "np") as file:  # "pt" would map the whole file
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            return {
                name: torch.empty(part.get_shape(), dtype=STORED[part.get_dtype()], device="meta")
                for name, part in slices.items()
            }
    except KeyError as error:
        raise ValueError(f"{path.name} has tensors of the unknown type {error}. Save the weights as bfloat16") from None
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
