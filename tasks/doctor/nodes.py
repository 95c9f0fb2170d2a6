"""The nodes of the Ray cluster that is configured: what they run, and whether they see shared storage."""

import os
from pathlib import Path

from tasks.doctor.findings import Findings
from tasks.errors import UserError
from tasks.files import home
from tasks.machines.cluster import ray_cluster
from tasks.machines.nodes import ask, check_storage, check_versions, facts
from tasks.place import Cluster

GIB = 2**30


def nodes(found: Findings, cluster: Cluster) -> None:
    """Versions, storage and its free space on every node."""
    if cluster.ray.address == "local":
        found.good(f"Ray {facts()['ray']}, embedded in this machine")
        return
    folder = home() / cluster.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with ray_cluster(cluster.ray, 0):
            check_versions()
            check_storage(folder)
            same = " ".join(f"{name} {number}," for name, number in facts().items())
            for address, free in ask(_free, folder).items():
                found.good(f"Ray node {address}: {same} all as here; sees {folder}, {free / GIB:.0f} GiB free")
    except UserError as error:
        for sentence in str(error).splitlines():
            found.wrong(sentence)


def _free(folder: Path) -> int:
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
