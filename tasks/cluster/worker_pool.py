"""A pool of workers: objects of one class that run tasks, in this process or as Ray actors.

A single worker with `ray.address: local` runs in this process, because Ray takes ten seconds to start another one on
the same machine. Every other pool runs on Ray. The worker class and its results are the same.

With `zero_stage: 3` the workers share one copy of a model (training/models/sharded.py). All ranks run a
method at the same time, because each forward pass is a collective. A lost worker restarts the whole group; in any
other pool it restarts alone.
"""

import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tasks.cluster import nodes, placement
from tasks.cluster.ray_cluster import ray_cluster
from tasks.cluster.store import store_address
from tasks.config.cluster import Cluster, Group
from tasks.config.paths import main_checkout
from tasks.errors import UserError

DEATH_NOTICE = 10.0  # seconds until Ray reports a dead worker, after another rank failed because of it

Task = tuple[Any, ...]  # the arguments of a method
Results = Iterator[tuple[int, list[Any]]]  # the number of a task, and its result or those of all ranks


class Worker:
    """A worker of a pool. In a ZeRO-3 group it is a rank of a process group."""

    REPLICATED = frozenset({"call"})  # methods that all ranks of a ZeRO-3 group run with the same task
    IN_PROCESS = True  # whether a single local worker runs in the driver's process

    def __init__(self, number: int = 0) -> None:
        self.number, self.rank, self.world_size, self.zero3 = number, 0, 1, False

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def join(self, store: str, rank: int, world_size: int) -> None:
        from training.distributed.process_group import join_process_group  # DeepSpeed, which a driver never needs

        self.rank, self.world_size, self.zero3 = rank, world_size, True
        join_process_group(store, rank, world_size)


class WorkerPool:
    """Starts with the first task, so that a stage without tasks starts nothing; stops at the end of its block."""

    def __init__(
        self,
        cluster: Cluster,
        group: Group,
        worker_class: type[Worker],
        stage: str,
        max_workers: int | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.cluster, self.group, self.worker_class, self.stage, self.log = cluster, group, worker_class, stage, log
        self.zero3 = getattr(group, "zero_stage", 0) == 3
        self.num_workers = group.num_workers if self.zero3 else min(group.num_workers, max_workers or group.num_workers)
        single = cluster.ray.address == "local" and self.num_workers == 1 and not self.zero3
        self.in_process = single and worker_class.IN_PROCESS
        self.actors: list[Any] = []
        self.session: Path | None = None  # the private folder of an embedded Ray cluster
        self.placement_group: Any = None
        self.resources = ExitStack()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.actors.clear()
        self.resources.close()

    def map(self, method: str, tasks: Sequence[Task], report: Callable[[int], None] = lambda number: None) -> list[Any]:
        """The result of each task, in their order; `report` gets the number of each finished task."""
        results: dict[int, Any] = {}
        for number, (result, *_) in self.results(method, tasks):
            results[number] = result
            report(number)
        return [results[number] for number in range(len(tasks))]

    def results(self, method: str, tasks: Sequence[Task]) -> Results:
        """The results as tasks finish. A replicated method of a ZeRO-3 group gives one result per rank."""
        if not tasks:
            return
        self._start()
        if self.in_process:
            (worker,) = self.actors
            yield from ((number, [getattr(worker, method)(*task)]) for number, task in enumerate(tasks))
            return
        import ray

        try:
            yield from self._run_in_lockstep(method, tasks) if self.zero3 else self._run_independently(method, tasks)
        except ray.exceptions.RayTaskError as error:  # raise what the method raised
            raise error.cause from error

    def shared_path(self, root: Path, *parts: Path) -> Path:
        """Where every worker finds a folder, or those parts of it."""
        self._start()
        return nodes.path_on_nodes(self.cluster, root, parts)

    @contextmanager
    def shared_output(self, folder: Path) -> Iterator[Path]:
        """Where a worker writes the content of `folder`: directly, or by way of a folder on shared storage."""
        if self.cluster.ray.address == "local":
            yield folder.resolve()
            return
        shared = main_checkout() / self.cluster.output_dir / "inputs" / f"{self.stage}-{uuid.uuid4().hex[:12]}"
        shared.mkdir(parents=True)
        try:
            yield shared
            nodes.refresh_directory(shared)
            shutil.copytree(shared, folder, dirs_exist_ok=True)
        finally:
            shutil.rmtree(shared, ignore_errors=True)

    def _start(self) -> None:
        if self.actors or self.placement_group:
            return
        if self.in_process:
            self._check_gpu()
            self.actors = [self.worker_class()]
            return
        config, group, enter = self.cluster.ray, self.group, self.resources.enter_context
        self.session = enter(ray_cluster(config, self.num_workers * group.cpus_per_worker))
        self.placement_group = enter(placement.reserve_placement_group(config, group, self.num_workers))
        enter(nodes.report_node_changes(config, lambda change: self.log(f"{self.stage}: {change}")))
        if not self.zero3:  # a ZeRO-3 group starts with its first task, and restarts if that fails
            self._start_actors()

    def _check_gpu(self) -> None:
        from training.evaluation.hardware import gpus  # imports torch

        if self.group.gpus_per_worker and not gpus():
            raise UserError(
                f"infra/cluster.yaml: inference.gpus_per_worker is {self.group.gpus_per_worker:g}, but torch finds no "
                "GPU on this machine. Set it to 0, or set ray.address to a cluster."
            )

    def _start_actors(self) -> None:
        restarts = 0 if self.zero3 else placement.MAX_RESTARTS
        self.actors = [
            placement.actor_class(self.group, self.worker_class, self.placement_group, n, restarts).remote(n)
            for n in range(self.num_workers)
        ]
        if self.zero3:
            import ray

            store = ray.get(self.actors[0].call.remote(store_address, self.session))
            self._run_ranks("join", [(store, rank, self.num_workers) for rank in range(self.num_workers)])

    def _run_independently(self, method: str, tasks: Sequence[Task]) -> Results:
        """One task for each idle actor. Ray restarts a lost actor and repeats its task (`actor_class`)."""
        import ray

        waiting, idle = deque(enumerate(tasks)), deque(self.actors)
        running: dict[Any, tuple[int, Any]] = {}
        while waiting or running:
            while waiting and idle:
                (number, task), actor = waiting.popleft(), idle.popleft()
                running[getattr(actor, method).remote(*task)] = (number, actor)
            (done, *_), _ = ray.wait(list(running))
            number, actor = running.pop(done)
            idle.append(actor)
            yield number, [ray.get(done)]

    def _run_in_lockstep(self, method: str, tasks: Sequence[Task]) -> Results:
        """The same task for all ranks, or one task each; ranks beyond the last task repeat it for the collectives."""
        if method in self.worker_class.REPLICATED:
            for number, task in enumerate(tasks):
                yield number, self._run_with_restarts(method, [task] * self.num_workers)
            return
        for first in range(0, len(tasks), self.num_workers):
            numbers = [min(first + rank, len(tasks) - 1) for rank in range(self.num_workers)]
            results = self._run_with_restarts(method, [tasks[number] for number in numbers])
            yield from ((number, [results[number - first]]) for number in dict.fromkeys(numbers))

    def _run_with_restarts(self, method: str, tasks: Sequence[Task]) -> list[Any]:
        """Run on all ranks; a lost worker restarts the group, and nothing else does."""
        import ray

        restarts = 0
        while True:
            try:
                if not self.actors:
                    self._start_actors()
                return self._run_ranks(method, tasks)
            except ray.exceptions.RayActorError:
                if restarts == placement.MAX_RESTARTS:
                    raise
                restarts += 1
                self.log(f"{self.stage}: a worker was lost; restarting the worker group")
                for actor in self.actors:
                    ray.kill(actor)
                self.actors = []

    def _run_ranks(self, method: str, tasks: Sequence[Task]) -> list[Any]:
        """The results of all ranks. A failed rank ends the wait: the others wait for it, or fail because of it."""
        import ray

        futures = [getattr(actor, method).remote(*task) for actor, task in zip(self.actors, tasks, strict=True)]
        waiting, failure = futures, None
        while waiting:
            done, waiting = ray.wait(waiting, timeout=DEATH_NOTICE if failure else None)
            if not done:
                break
            try:
                ray.get(done)
            except ray.exceptions.RayActorError:  # the cause of the other ranks' errors
                raise
            except ray.exceptions.RayTaskError as error:
                failure = failure or error
        if failure:
            raise failure
        return ray.get(futures)
