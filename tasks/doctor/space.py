"""Whether this run's files fit the disk, and /dev/shm what lives there."""

import shutil
from pathlib import Path
from typing import Any

from tasks.doctor.findings import Findings
from tasks.files import home
from tasks.params import Cluster, Params
from tasks.paths import PAIRS

GIB = 2**30
LEAST = 10 * GIB  # where the model is not known yet
LEAST_SHARED = GIB // 2
OPTIMIZER = 12  # bytes of a trainable parameter: a master weight and two moments
GGUF = {"f16": 2.0, "q8_0": 1.07}  # bytes of a parameter
LARGEST_UPLOAD = GIB  # as in registry.py: above it weights are not copied into MLflow


def disk(found: Findings, params: Params, cluster: Cluster, sizes: Any | None) -> None:
    """`sizes` of the model, as training.memory measures them; None where it is not here yet."""
    room = shutil.disk_usage(home()).free
    if sizes is None:
        least = f"{room / GIB:.0f} GiB of disk are free, and the model is not here yet to say how much it takes"
        if room < LEAST:
            found.wrong(f"{least}. Make room: {_advice()}.")
        else:
            found.good(least)
        return
    parts = needed(params, cluster, sizes)
    total = sum(parts.values())
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size > 0.05 * GIB)
    sentence = f"this run writes up to {total / GIB:.1f} GiB{f' ({listed})' if listed else ''}"
    if total > room:
        found.wrong(f"{sentence}, and {room / GIB:.1f} GiB of disk are free. Make room: {_advice()}.")
    else:
        found.good(f"{sentence}, and {room / GIB:.0f} GiB of disk are free")


def needed(params: Params, cluster: Cluster, sizes: Any) -> dict[str, float]:
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


def _advice() -> str:
    return (
        "`dvc gc --workspace` drops what nothing here needs, actor_train.keep_checkpoints and output_dir move the rest"
    )


def shared_memory(found: Findings, place: Path = Path("/dev/shm")) -> None:
    """Ray's objects and the messages between workers of one machine live there; a container gets 64 MiB by default."""
    if not place.exists():
        return
    size = shutil.disk_usage(place)
    sentence = f"{place} has {size.total / GIB:.2g} GiB, {size.free / GIB:.2g} of them free"
    if size.free < LEAST_SHARED:
        found.wrong(
            f"{sentence}, and workers need half a GiB. Start the container with `--shm-size=8g`, or run "
            f"`mount -o remount,size=8G {place}`."
        )
    else:
        found.good(sentence)
