"""Whether this run's files fit the disk, and /dev/shm what lives there."""

import shutil
from pathlib import Path
from typing import Any

from tasks.disk import needed
from tasks.doctor.findings import Findings
from tasks.files import home
from tasks.params import Cluster, Params

GIB = 2**30
LEAST = 10 * GIB  # where the model is not known yet
LEAST_SHARED = GIB // 2


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
