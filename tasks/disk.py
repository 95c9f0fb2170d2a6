"""A full or failing disk as a sentence (which file system, how much is free and needed), checked before each stage.

`check` estimates what a stage writes (`training`: what a training has still to write). `explain` recognises
the errors of a full or failing disk in whatever exception a library wraps them (OSError, SQLite's, pyarrow's,
safetensors', Ray's).
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import UserError
from tasks.files import home, recall
from tasks.paths import BASE, PAIRS, RAW

if TYPE_CHECKING:
    from tasks.params import Cluster, Params

FULL = re.compile(r"No space left on device|Disk quota exceeded|disk is full|\(os error 28\)")
BROKEN = re.compile(r"Input/output error|disk I/O error|Read-only file system|\(os error 5\)")
LEAST = 8 * 2**20  # bytes for journals, locks and MLflow's store, whatever a stage writes itself
OPTIMIZER = 12  # bytes of a trainable parameter: a master weight and two moments
GGUF = {"f16": 2.0, "q8_0": 1.07}  # bytes of a parameter
LARGEST_UPLOAD = 2**30  # as in registry.py: above it weights are not copied into MLflow


def check(stage: str, params: "Params", cluster: "Cluster") -> None:
    """Refuse a stage that cannot end, before it begins."""
    require(stage, _estimate(stage, params, cluster))


def require(stage: str, sizes: list[tuple[Path, float]]) -> None:
    """`sizes` are (folder, bytes) to be written; the folders may lie on several file systems."""
    wanted: dict[Path, float] = {}
    for folder, size in sizes:
        mount = mount_of(folder)
        wanted[mount] = wanted.get(mount, LEAST) + size
    for mount, size in wanted.items():
        free = shutil.disk_usage(mount).free
        if free < size:
            raise UserError(
                f"{stage} needs about {human(size)} on the file system {mount}, and {human(free)} are free. {ADVICE}"
            )


def explain(error: BaseException, folder: Path | None = None) -> str | None:
    """The sentence for an error that a full or failing disk caused; None for any other error."""
    for one in _chain(error):
        number, said = getattr(one, "errno", None), str(one)
        name = getattr(one, "filename2", None) or getattr(one, "filename", None)
        place = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else folder
        if number in (errno.ENOSPC, errno.EDQUOT) or FULL.search(said):
            return full(place)
        if "PytorchStreamWriter failed" in said and is_full(place):  # torch does not say why
            return full(place)
        if number in (errno.EIO, errno.EROFS) or BROKEN.search(said):
            return broken(place, os.strerror(number) if number else said.splitlines()[0])
    return None


def full(place: Path | None = None) -> str:
    """`place` is what could not be written; where that is not known, the fullest of the file systems that we use."""
    mount = mount_of(place) if place else _fullest()
    size, state = shutil.disk_usage(mount), os.statvfs(mount)
    what = f"{place} could not be written: the" if place else "The"
    free = f"{human(size.free)} of {human(size.total)} are free"
    if state.f_files and not state.f_favail:
        free += ", and it has no inode left for another file"
    return f"{what} file system {mount} is full ({free}). {ADVICE}"


def is_full(place: Path | None = None) -> bool:
    """Whether the file system of `place`, or the fullest that we use, has no room left to speak of."""
    return shutil.disk_usage(mount_of(place) if place else _fullest()).free < LEAST


def broken(place: Path | None, why: str) -> str:
    what = f"{place}, on the file system {mount_of(place)}," if place else f"A file of the run in {Path.cwd()}"
    return (
        f"{what} could not be written: {why}. Look at the disk (`dmesg`, or your storage's log). When it works, run "
        "the same command again: it continues where it stopped."
    )


ADVICE = (
    "Make room there (`make gc` shows what old runs hold) or move output_dir in infra/cluster.yaml, and run the same "
    "command again: it continues where it stopped."
)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and those behind it, Ray's `cause` included."""
    seen: list[BaseException] = []
    todo = [error]
    while todo and len(seen) < 20:
        one = todo.pop(0)
        if any(one is other for other in seen):
            continue
        seen.append(one)
        yield one
        behind = (one.__cause__, one.__context__, getattr(one, "cause", None), getattr(one, "__notes__", None))
        todo += [other for other in behind if isinstance(other, BaseException)]


def _fullest() -> Path:
    from tasks.params import load_cluster

    places = [Path(), home(), Path(os.environ.get("TMPDIR", "/tmp"))]
    with suppress(UserError):
        places.append(home() / load_cluster().output_dir)
    return min({mount_of(place) for place in places}, key=lambda mount: shutil.disk_usage(mount).free)


def mount_of(path: Path) -> Path:
    """The file system that a path is or will be on, by its mount point."""
    path = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists()).resolve()
    device = path.stat().st_dev
    while path != path.parent and path.parent.stat().st_dev == device:
        path = path.parent
    return path


def human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _estimate(stage: str, params: "Params", cluster: "Cluster") -> list[tuple[Path, float]]:
    """(folder, bytes) of what a stage writes, as far as that can be known before."""
    known: dict[str, Callable[[], list[tuple[Path, float]]]] = {
        "source": lambda: [(RAW, _data(params)), (BASE, _merged(params))],
        "prepare": lambda: [(PAIRS, 3.0 * _size(RAW))],  # shards, pairs, the card's quarantine
        "reference": lambda: [(PAIRS, 1.0 * _size(PAIRS)), (home() / cluster.output_dir, 1.0 * _size(PAIRS))],
        "export": lambda: [(Path("data"), _exported(params)), *_through_storage(params, cluster)],
    }
    return known.get(stage, lambda: [(Path("data"), 0.0)])()


def _data(params: "Params") -> float:
    from tasks.dataset.fetch import origins
    from tasks.models import local_path

    local = [local_path(one["address"]) for one in origins(params.source) if ":" not in one["address"]]
    return float(sum(_size(path) for path in local if path.exists()))


def _merged(params: "Params") -> float:
    """A base with an adapter merged into it is written anew."""
    from tasks.models import local_path

    return float(_size(local_path(params.source.model))) if params.source.adapter else 0.0


def training(params: "Params", cluster: "Cluster", folder: Path) -> list[tuple[Path, float]]:
    """Of a training in `folder`, less what its earlier attempts left there: they are replaced one by one."""
    from tasks.models import base_folder
    from training.memory import measure

    adapter = params.train.adapter.model_dump() if params.train.adapter else None
    parts = needed(params, cluster, measure(base_folder(params.source.model), adapter, params.train.quantization))
    policy = parts["policy"] / 3
    return [(folder, max(0.0, parts["checkpoints"] + policy - _size(folder))), (Path("data"), policy)]


def _through_storage(params: "Params", cluster: "Cluster") -> list[tuple[Path, float]]:
    """Where a worker of another node writes the export before it is moved here."""
    return [] if cluster.ray.address == "local" else [(home() / cluster.output_dir, _exported(params))]


def _exported(params: "Params") -> float:
    """Of the base's weight files as the manifest of data/base has them, at four bytes of a parameter at most."""
    sizes = recall(BASE / "manifest.json").get("sizes", {})
    weights = float(sum(size for name, size in sizes.items() if name.endswith(".safetensors")))
    return weights * (1 + len(params.export.gguf))


def needed(params: "Params", cluster: "Cluster", sizes: Any) -> dict[str, float]:
    """Bytes by what they hold. DVC's cache has a second copy of every out, where the disk cannot share blocks."""
    wide = 4 if params.train.dtype == "float32" else 2
    merged = sizes.parameters * (4 if params.export.dtype == "float32" else 2)
    saved = (sizes.trainable if params.train.adapter else sizes.parameters) * wide
    gguf = sum(sizes.parameters * GGUF[kind] for kind in params.export.gguf)
    pairs = sum(path.stat().st_size for path in PAIRS.glob("*.parquet")) if PAIRS.exists() else 0
    # A new one is whole before an old one goes.
    keep = cluster.actor_train.keep_checkpoints + cluster.actor_train.keep_best + 1
    return {
        "checkpoints": float(sizes.trainable * (wide + OPTIMIZER) * keep),
        "policy": 3.0 * saved,  # where it is trained, as an out, in the cache
        "export": 2.0 * (merged + gguf),
        "registry": float(merged) if merged <= LARGEST_UPLOAD else 0.0,
        "pairs and reference": 5.0 * pairs,
    }


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.exists() else 0
