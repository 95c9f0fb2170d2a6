"""The nodes of a Ray cluster: their package versions, their view of shared storage, and which join or are lost.

Every function needs a connected driver (`ray_cluster`).
"""

import platform
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.config.cluster import Cluster, Ray
from tasks.config.paths import main_checkout
from tasks.errors import UserError
from tasks.system.files import fingerprint, hash_files, publish
from tasks.system.progress import background_thread

PACKAGES = ("ray", "torch", "transformers", "deepspeed", "peft")  # numbers and pickles depend on these, and on Python
TASK_TIMEOUT = 120.0  # seconds for a node to run a small task; the first one also transfers our code

Versions = dict[str, str]


def package_versions() -> Versions:
    """Of the machine that this runs on."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name).split("+")[0]  # +cpu and +cu130 are the same source
        except PackageNotFoundError:
            versions[name] = "missing"
    return versions


def run_on_nodes(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """The result on every node that takes work, by the node's address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    futures = {}
    for node in live_nodes():
        pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        futures[node["NodeManagerAddress"]] = remote.options(scheduling_strategy=pinned).remote(*arguments)
    ray.wait(list(futures.values()), num_returns=len(futures), timeout=TASK_TIMEOUT)
    try:
        return {address: ray.get(future, timeout=0) for address, future in futures.items()}
    except ray.exceptions.RayError as error:
        unresponsive = [address for address, future in futures.items() if not ray.wait([future], timeout=0)[0]]
        raise UserError(
            f"Ray node {', '.join(unresponsive) or 'a node'} could not run a small test task ({type(error).__name__}). "
            "Read its logs (/tmp/ray/session_latest/logs on that node), and restart its Ray."
        ) from error


def live_nodes() -> list[Any]:
    """Nodes that take work; a driver's own node may have no CPU."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def check_versions() -> None:
    if problems := version_mismatches(run_on_nodes(package_versions), package_versions()):
        raise UserError("\n".join(problems))


def version_mismatches(nodes: dict[str, Versions], ours: Versions) -> list[str]:
    """A sentence for each node whose versions differ."""
    sentences = []
    for address, theirs in nodes.items():
        other = [f"{name} {theirs.get(name)} (here: {ours[name]})" for name in ours if theirs.get(name) != ours[name]]
        if other:
            sentences.append(f"Ray node {address} has {', '.join(other)}. Install the versions of requirements.lock.")
    return sentences


def check_storage(folder: Path) -> None:
    """Every node reads and writes `folder`, and it is the same folder everywhere."""
    probe = folder / f".seen-{uuid.uuid4().hex[:8]}"
    probe.write_text(probe.name)
    try:
        answers = run_on_nodes(_answer_probe, probe)
        without = [address for address, read in answers.items() if not (read and Path(f"{probe}.{address}").exists())]
    finally:
        for path in folder.glob(f"{probe.name}*"):
            path.unlink(missing_ok=True)
    if without:
        raise UserError(
            f"Ray node {', '.join(without)} does not see {folder}. Set output_dir in infra/cluster.yaml to a folder on "
            "storage that every node mounts at the same path, writable."
        )


def _answer_probe(probe: Path) -> bool:
    """On a node: read the driver's file, and write one beside it."""
    import ray

    try:
        is_same = probe.read_text() == probe.name
        Path(f"{probe}.{ray.util.get_node_ip_address()}").touch()
    except OSError:
        return False
    return is_same


def path_on_nodes(cluster: Cluster, root: Path, parts: Sequence[Path] = ()) -> Path:
    """Where every node finds `root`, or its `parts`: there, or in a copy on shared storage if a node lacks a file.

    Files are the same when names, sizes and modification times agree. The times of a whole folder (a model) may
    differ, because each node has its own cache.
    """
    root = root.resolve()
    if cluster.ray.address == "local":
        return root
    shared = main_checkout() / cluster.output_dir
    check_storage(shared)
    times, parts = bool(parts), parts or [Path()]
    ours = list_files(root, parts, times)
    if all(theirs == ours for theirs in run_on_nodes(list_files, root, parts, times).values()):
        return root
    copy = shared / "inputs" / fingerprint([hash_files(root / part) for part in parts])
    if not copy.exists():
        print(f"Not every node sees {root}; copying the workers' input to {copy}", flush=True)
        with publish(copy) as aside:
            for part in parts:
                shutil.copytree(root / part, aside / part, dirs_exist_ok=True)
    return copy


def list_files(root: Path, parts: Sequence[Path], times: bool) -> list[tuple[Any, ...]]:
    """Name, size and, with `times`, modification time of every file."""
    files: list[tuple[Any, ...]] = []
    for path in sorted(path for part in parts for path in (root / part).rglob("*") if path.is_file()):
        state = path.stat()
        files.append((str(path.relative_to(root)), state.st_size, *([state.st_mtime_ns] if times else [])))
    return files


def refresh_directory(folder: Path) -> None:
    """NFS may show a folder as it was half a minute ago, until this client changes something in it."""
    marker = folder / f".look-{uuid.uuid4().hex[:8]}"
    marker.touch()
    marker.unlink()


def report_node_changes(config: Ray, log: Callable[[str], None]) -> AbstractContextManager[None]:
    """Log which nodes are lost and which join while the block runs."""
    return nullcontext() if config.address == "local" else background_thread(partial(_watch_nodes, log))


def _watch_nodes(log: Callable[[str], None], stop: threading.Event) -> None:
    known = {node["NodeID"]: node["NodeManagerAddress"] for node in live_nodes()}
    while not stop.wait(1.0):
        now = {node["NodeID"]: node["NodeManagerAddress"] for node in live_nodes()}
        for name in known.keys() - now.keys():
            log(f"node {known[name]} is lost; its workers restart when there is room for them")
        for name in now.keys() - known.keys():
            log(f"node {now[name]} has joined")
        known = now
