"""Placement of a worker group: the resources of each worker, a placement group for all, and Ray actors in it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tasks.cluster import nodes
from tasks.config.cluster import Group, Ray
from tasks.errors import UserError

PLACEMENT_TIMEOUT = 10.0  # seconds in which a cluster with free resources places a group
MAX_RESTARTS = 2  # of an actor, or a ZeRO-3 group, whose worker or node is lost


def resource_bundle(group: Group) -> dict[str, float]:
    """The resources of one worker."""
    gpus = {"GPU": group.gpus_per_worker} if group.gpus_per_worker else {}
    return {"CPU": group.cpus_per_worker, **gpus, **group.resources}


@contextmanager
def reserve_placement_group(config: Ray, group: Group, workers: int) -> Iterator[Any]:
    """A bundle of resources for each worker, reserved as soon as the cluster has room for all.

    An autoscaler may add nodes for it, so the versions of all nodes are checked only then.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    embedded = config.address == "local"
    reserved = placement_group([resource_bundle(group)] * workers, strategy=group.placement)
    try:
        _wait_until_placed(reserved, resource_bundle(group), workers, embedded)
        if not embedded:
            nodes.check_versions()
        yield reserved
    finally:
        remove_placement_group(reserved)


def _wait_until_placed(reserved: Any, needed: dict[str, float], workers: int, embedded: bool) -> None:
    """An embedded cluster never grows, so waiting is an error there."""
    if reserved.wait(PLACEMENT_TIMEOUT):
        return
    import ray

    available = {name: n for name, n in ray.cluster_resources().items() if name in {"CPU", "GPU", *needed}}
    problem = (
        f"{workers} workers with {_describe(needed)} each do not fit on {len(nodes.live_nodes())} nodes with "
        f"{_describe(available)} in total"
    )
    if missing := sorted(needed.keys() - available.keys() - {"CPU", "GPU"}):
        problem += (
            f". No node offers the custom resource {', '.join(missing)}, which `resources` of the worker group in "
            "infra/cluster.yaml requests: set `resources` to {}, or start a node with `ray start --resources "
            f"'{json.dumps(dict.fromkeys(missing, 1))}'`"
        )
    if embedded:
        raise UserError(
            f"infra/cluster.yaml: {problem}. Lower num_workers, cpus_per_worker or gpus_per_worker, set placement "
            "to PACK, or set ray.address to a larger cluster."
        )
    print(f"{problem}, or other jobs use them. Waiting for nodes to join or to become free.", flush=True)
    while not reserved.wait(60):
        print(f"Still waiting for {workers} workers with {_describe(needed)} each.", flush=True)


def _describe(resources: dict[str, float]) -> str:
    return ", ".join(f"{number:g} {name}" for name, number in sorted(resources.items())) or "nothing"


def actor_class(
    group: Group, worker_class: type, placement_group: Any, bundle: int, restarts: int = MAX_RESTARTS
) -> Any:
    """The worker class as a Ray actor in its bundle; Ray restarts it when the worker or its node is lost."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return ray.remote(
        num_cpus=group.cpus_per_worker,
        num_gpus=group.gpus_per_worker,
        resources=group.resources,
        max_restarts=restarts,
        max_task_retries=restarts,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group, bundle),
    )(worker_class)
