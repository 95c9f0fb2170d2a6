"""The nodes of a Ray cluster: that they run what we run, see what workers read, and which come and go.

Everything here is for a connected driver (`ray_cluster`).
"""

import json
import platform
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.files import fingerprint, hash_files, publish
from tasks.progress import meanwhile

SAME = ("ray", "torch", "transformers", "deepspeed", "peft")  # and Python: what numbers and pickles depend on
ANSWER = 120.0  # seconds for a node to run a small task; the first one brings our code there
SOON = 10.0  # seconds in which a free cluster places a group

Facts = dict[str, Any]


def facts() -> Facts:
    """Of the machine that this runs on."""
    found = {"python": platform.python_version()}
    for name in SAME:
        try:
            found[name] = version(name).split("+")[0]  # +cpu and +cu130 are the same source
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def ask(question: Callable[..., Any], *given: Any) -> dict[str, Any]:
    """The answer of every node that can work, by its address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(question)
    asked = {}
    for node in _alive():
        pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[node["NodeManagerAddress"]] = remote.options(scheduling_strategy=pinned).remote(*given)
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER)
    try:
        return {address: ray.get(answer, timeout=0) for address, answer in asked.items()}
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
        silent = [address for address, answer in asked.items() if not ray.wait([answer], timeout=0)[0]]
        who = ", ".join(silent) or "a node"
        raise UserError(
            f"Ray node {who} could not run a small task of ours ({type(error).__name__}). Look at its logs "
            "(/tmp/ray/session_latest/logs there), and start its Ray again."
        ) from error


def _alive() -> list[Any]:
    """Nodes that take work; a driver's own node may have no CPU."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def check_versions() -> None:
    if wrong := mismatches(ask(facts), facts()):
        raise UserError("\n".join(wrong))


def mismatches(nodes: dict[str, Facts], ours: Facts) -> list[str]:
    """A sentence for each node that runs something else."""
    sentences = []
    for address, theirs in nodes.items():
        other = [f"{name} {theirs.get(name)} (here: {ours[name]})" for name in ours if theirs.get(name) != ours[name]]
        if other:
            sentences.append(f"Ray node {address} has {', '.join(other)}. Install there what requirements.lock names.")
    return sentences


def check_storage(folder: Path) -> None:
    """Every node reads and writes `folder`, and it is one and the same."""
    mark = folder / f".seen-{uuid.uuid4().hex[:8]}"
    mark.write_text(mark.name)
    try:
        blind = [address for address, sees in ask(_answers, mark).items() if not sees or not _left(mark, address)]
    finally:
        for path in folder.glob(f"{mark.name}*"):
            path.unlink(missing_ok=True)
    if blind:
        raise UserError(
            f"Ray node {', '.join(blind)} does not see {folder}. Set output_dir in infra/cluster.yaml to a folder on "
            "storage that every node mounts at the same path, writable."
        )


def _answers(mark: Path) -> bool:
    import ray

    try:
        seen = mark.read_text() == mark.name
        Path(f"{mark}.{ray.util.get_node_ip_address()}").touch()
    except OSError:
        return False
    return seen


def _left(mark: Path, address: str) -> bool:
    return Path(f"{mark}.{address}").exists()


def share(folder: Path, root: Path, parts: Sequence[Path], times: bool = True) -> Path:
    """Where every node finds the `parts` below `root`: there, or, where one cannot see them, in a copy of `folder`'s.

    Parts are the same files when names, sizes and times of change agree; a model's times may differ (a cache of its
    own on each node).
    """
    root = root.resolve()
    ours = listing(root, parts, times)
    if all(theirs == ours for theirs in ask(listing, root, parts, times).values()):
        return root
    copy = folder / "inputs" / fingerprint([hash_files(root / part) for part in parts])
    if not copy.exists():
        print(f"Not every node sees {root}; what workers read is copied to {copy}", flush=True)
        with publish(copy) as aside:
            for part in parts:
                shutil.copytree(root / part, aside / part, dirs_exist_ok=True)
    return copy


def listing(root: Path, parts: Sequence[Path], times: bool) -> list[tuple[Any, ...]]:
    """Name, size and, if asked, time of change of every file."""
    found: list[tuple[Any, ...]] = []
    for path in sorted(path for part in parts for path in (root / part).rglob("*") if path.is_file()):
        state = path.stat()
        found.append((str(path.relative_to(root)), state.st_size, *([state.st_mtime_ns] if times else [])))
    return found


def wait_for(placed: Any, needs: dict[str, float], workers: int, embedded: bool) -> None:
    """Until the cluster has room for a group. An embedded one grows no further; another may."""
    if placed.wait(SOON):
        return
    import ray

    have = {name: n for name, n in ray.cluster_resources().items() if name in {"CPU", "GPU", *needs}}
    words = f"{workers} workers with {_words(needs)} each do not fit {len(_alive())} nodes with {_words(have)} in all"
    if missing := sorted(needs.keys() - have.keys() - {"CPU", "GPU"}):
        words += (
            f". No node offers the custom resource {', '.join(missing)}, which `resources` of the worker group in "
            f"infra/cluster.yaml asks for: {_offer(missing, embedded)}"
        )
    if embedded:
        raise UserError(
            f"infra/cluster.yaml: {words}. Lower num_workers, cpus_per_worker or gpus_per_worker, choose "
            "placement PACK, or set ray.address to a larger cluster."
        )
    print(f"{words}, or others use them. Waiting for nodes to join or to become free.", flush=True)
    while not placed.wait(60):
        print(f"Still waiting for {workers} workers with {_words(needs)} each.", flush=True)


def _offer(missing: Sequence[str], embedded: bool) -> str:
    if embedded:
        return "the embedded cluster (ray.address: local) has none. Set `resources` to {}"
    return "start a node with `ray start --resources '" + json.dumps(dict.fromkeys(missing, 1)) + "'`"


def _words(resources: dict[str, float]) -> str:
    return ", ".join(f"{number:g} {name}" for name, number in sorted(resources.items())) or "nothing"


def watched(say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Say which nodes are lost and which join, meanwhile."""
    return meanwhile(partial(_watch, say))


def _watch(say: Callable[[str], None], over: threading.Event) -> None:
    known = {node["NodeID"]: node["NodeManagerAddress"] for node in _alive()}
    while not over.wait(1.0):
        now = {node["NodeID"]: node["NodeManagerAddress"] for node in _alive()}
        for name in known.keys() - now.keys():
            say(f"node {known[name]} is lost; its workers start again when there is room for them")
        for name in now.keys() - known.keys():
            say(f"node {now[name]} has joined")
        known = now
