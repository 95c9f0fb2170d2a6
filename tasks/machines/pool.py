"""The workers of a group: objects of one class that take tasks, in this process or as Ray actors.

One worker with `ray.address: local` is an object of this process, since Ray would take ten seconds to start another
process on the same machine. Everything else runs on Ray. The class is the same, and so is what it computes.
"""

import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tasks import place
from tasks.errors import UserError
from tasks.files import home
from tasks.machines import cluster as machines
from tasks.progress import Bar


class Caller:
    """A worker that calls functions and keeps nothing."""

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        return function(*given)


class Workers:
    """Starts with the first task, so that a stage without one starts nothing; ends with its block."""

    def __init__(
        self, cluster: place.Cluster, group: machines.Group, kind: type, stage: str, most: int | None = None
    ) -> None:
        self.cluster, self.group, self.kind, self.stage = cluster, group, kind, stage
        self.count = min(group.num_workers, most or group.num_workers)
        self.in_process = cluster.ray.address == "local" and self.count == 1
        self.actors: list[Any] = []
        self.open = ExitStack()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.actors.clear()
        self.open.close()

    def map(
        self, method: str, tasks: Sequence[tuple[Any, ...]], report: Callable[[int], None] = lambda number: None
    ) -> list[Any]:
        """What `method` gives for each task, in their order; `report` gets the number of each task that is done."""
        if not tasks:
            return []
        self._start()
        found: dict[int, Any] = {}
        for number, result in self._here(method, tasks) if self.in_process else self._on_ray(method, tasks):
            found[number] = result
            report(number)
        return [found[number] for number in range(len(tasks))]

    def folder(self, root: Path, *parts: Path) -> Path:
        """Where every worker finds the folder, or its parts."""
        self._start()
        return machines.on_nodes(self.cluster, root, parts)

    @contextmanager
    def output(self, folder: Path) -> Iterator[Path]:
        """Where a worker writes what `folder` has when the block ends: itself, or a folder on shared storage."""
        if self.cluster.ray.address == "local":
            yield folder.resolve()
            return
        shared = home() / self.cluster.output_dir / "inputs" / f"{self.stage}-{uuid.uuid4().hex[:12]}"
        shared.mkdir(parents=True)
        try:
            yield shared
            machines.look_again(shared)
            shutil.copytree(shared, folder, dirs_exist_ok=True)
        finally:
            shutil.rmtree(shared, ignore_errors=True)

    def _start(self) -> None:
        if self.actors:
            return
        if self.in_process:
            self._check_gpu()
            self.actors = [self.kind()]
            return
        where, group = self.cluster.ray, self.group
        self.open.enter_context(machines.ray_cluster(where, self.count * group.cpus_per_worker))
        placed = self.open.enter_context(machines.room_for(where, group, self.count))
        self.open.enter_context(machines.nodes_told(where, Bar(self.stage, 0, "")))
        self.actors = [machines.worker(group, self.kind, placed, number).remote() for number in range(self.count)]

    def _check_gpu(self) -> None:
        from training.hardware import gpus

        if self.group.gpus_per_worker and not gpus():
            raise UserError(
                f"infra/cluster.yaml: evaluate.gpus_per_worker is {self.group.gpus_per_worker:g}, and this machine has "
                "no GPU that torch can use. Set it to 0, or ray.address to a cluster."
            )

    def _here(self, method: str, tasks: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        (worker,) = self.actors
        return ((number, getattr(worker, method)(*task)) for number, task in enumerate(tasks))

    def _on_ray(self, method: str, tasks: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """A task for each idle actor. One that dies starts again and repeats its task (`cluster.worker`)."""
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
            try:
                yield number, ray.get(done)
            except ray.exceptions.RayTaskError as error:  # as if it had happened here
                raise error.cause from error
