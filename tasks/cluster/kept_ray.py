"""One embedded Ray cluster for all stages of a flow: starting one for each takes a quarter of a minute.

The flow starts a process that holds the cluster (`keep`), in the background, and names its session folder to the stages
in DPO_RAY. A stage connects (`find`, `connect`). It starts a cluster of its own where there is none: if it was started
by hand, or if the flow's cluster has died or has too few CPUs.
"""

import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import psutil

from tasks.cluster import embedded_ray
from tasks.config.cluster import Cluster, load_cluster
from tasks.system import processes
from tasks.system.files import read_json_or_empty, write_json

SESSION = "DPO_RAY"
HOLDER, ADDRESS, LOG = "holder.json", "address.json", "holder.log"  # files in the session folder
SERVERS = {"gcs_server", "raylet"}  # without one of these, a cluster is dead


class Kept(NamedTuple):
    folder: Path
    address: str
    token: str


def is_needed(cluster: Cluster, stale: Collection[str], stages: Sequence[str]) -> bool:
    """Whether one of the stages that will run needs an embedded cluster: a stale one, or one after a stale one."""
    first = next((number for number, stage in enumerate(stages) if stage in stale), len(stages))
    # A single evaluator works in its stage's own process.
    inference_on_ray = cluster.inference.num_workers > 1 or cluster.inference.zero_stage == 3
    on_ray = {"sft", "reference", "train", *(("sample", "evaluate", "export") if inference_on_ray else ())}
    return cluster.ray.address == "local" and not on_ray.isdisjoint(stages[first:])


def cpus_needed(cluster: Cluster) -> int:
    """Enough for each worker group alone; Ray Train's controller takes one more."""
    return math.ceil(max(cluster.reference.cpus, cluster.actor_train.cpus + 1, cluster.inference.cpus))


def keep_if_needed(
    root: Path, env: Mapping[str, str], stale: Collection[str], stages: Sequence[str]
) -> AbstractContextManager[Path | None]:
    return keep(root, env) if is_needed(load_cluster(root), stale, stages) else nullcontext()


@contextmanager
def keep(root: Path, env: Mapping[str, str]) -> Iterator[Path]:
    """Start a cluster for the workspace `root` without waiting for it; yields its session folder.

    The cluster ends with the block, and with this process however that ends.
    """
    with embedded_ray.private_session() as folder, (folder / LOG).open("w") as log:
        command = [sys.executable, "-m", "tasks.cluster.kept_ray", str(folder)]
        with processes.spawn(command, root, env, log) as holder:
            write_json(folder / HOLDER, processes.process_record(holder.pid))
            yield folder


def variables(session: Path | None) -> dict[str, str]:
    """The environment variable that leads a stage to the cluster."""
    return {SESSION: str(session)} if session else {}


def find(cpus: float, environment: Mapping[str, str]) -> Kept | None:
    """The flow's cluster, as soon as it has started; None if there is none that suits."""
    if not (name := os.environ.get(SESSION)):
        return None
    folder = Path(name)
    while (alive := processes.is_alive(read_json_or_empty(folder / HOLDER))) and not (folder / ADDRESS).exists():
        time.sleep(0.05)
    kept = read_json_or_empty(folder / ADDRESS)
    if not alive or not all(map(processes.is_alive, kept["servers"])):
        return None
    suits = kept["cpus"] >= cpus and kept["environment"] == _inherited(environment)
    return Kept(folder, kept["address"], kept["token"]) if suits else None


def connect(kept: Kept) -> bool:
    """Whether the cluster accepts this driver."""
    import ray

    host, _, port = kept.address.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()  # Ray itself would retry for minutes
        ray.init(address=kept.address, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # it died just now
        print(f"The flow's Ray cluster does not answer ({type(error).__name__}); starting another one", flush=True)
        ray.shutdown()
        return False
    return True


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What workers inherit from the process that started the cluster."""
    return {**environment, "PYTHONPATH": embedded_ray.python_path()}


def hold(folder: Path, cluster: Cluster) -> None:
    """Start the cluster, and hold it until SIGTERM."""
    cpus, environment = cpus_needed(cluster), embedded_ray.worker_environment(cluster.ray)
    embedded_ray.set_environment(environment)
    embedded_ray.start_ray(cpus, folder / "ray")
    import ray

    servers = [child.pid for child in psutil.Process().children() if child.name() in SERVERS]
    kept = {
        "address": ray.get_runtime_context().gcs_address,
        "token": os.environ["RAY_AUTH_TOKEN"],
        "cpus": cpus,
        "environment": _inherited(environment),
        "servers": [processes.process_record(pid) for pid in servers],
    }
    write_json(folder / ADDRESS, kept)
    try:
        signal.pause()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    hold(Path(sys.argv[1]), load_cluster())
