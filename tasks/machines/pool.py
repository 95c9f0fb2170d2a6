"""The workers of a group: objects of one class that take tasks, in this process or as Ray actors.

One worker with `ray.address: local` is an object of this process, since Ray would take ten seconds to start another
process on the same machine. Everything else runs on Ray. The class is the same, and so is what it computes.

With `zero_stage: 3` the workers share one copy of a model (training/split.py): all of them run a method at the same
time, since each pass of the model is a collective.
"""

import shutil
import socket
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

FOLLOW = 10.0  # seconds in which Ray notices that a worker died, after another failed because of it


class Member:
    """A worker that can be a rank of a group."""

    ALIKE: frozenset[str] = frozenset()  # methods that all ranks run with the same task, not each with one of its own

    def meeting(self, folder: str | None) -> str:
        """Where the ranks find each other: a file on one machine, a port of this worker's on several."""
        import ray

        if folder:
            return f"file://{folder}/group-{uuid.uuid4().hex}"
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def join(self, meeting: str, rank: int, world: int) -> None:
        from training import engine

        engine.join(meeting, rank, world)


class Caller(Member):
    """A worker that calls functions and keeps nothing."""

    ALIKE = frozenset({"call"})

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        return function(*given)


class Workers:
    """Starts with the first task, so that a stage without one starts nothing; ends with its block."""

    def __init__(
        self, cluster: place.Cluster, group: machines.Group, kind: type[Member], stage: str, most: int | None = None
    ) -> None:
        self.cluster, self.group, self.kind, self.stage = cluster, group, kind, stage
        self.split = getattr(group, "zero_stage", 0) == 3
        self.count = group.num_workers if self.split else min(group.num_workers, most or group.num_workers)
        self.in_process = cluster.ray.address == "local" and self.count == 1 and not self.split
        self.actors: list[Any] = []
        self.private: Path | None = None  # the folder of a Ray that is this stage's own
        self.placed: Any = None  # where the actors may be
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
        way = self._here if self.in_process else self._together if self.split else self._on_ray
        for number, result in way(method, tasks):
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
        if self.actors or self.placed:
            return
        if self.in_process:
            self._check_gpu()
            self.actors = [self.kind()]
            return
        where, group = self.cluster.ray, self.group
        self.private = self.open.enter_context(machines.ray_cluster(where, self.count * group.cpus_per_worker))
        self.placed = self.open.enter_context(machines.room_for(where, group, self.count))
        self.open.enter_context(machines.nodes_told(where, Bar(self.stage, 0, "")))
        if not self.split:  # a group starts with its first task, and is tried again if that fails
            self._start_actors()

    def _start_actors(self) -> None:
        """Workers that share a model start again as a whole group, others each by itself."""
        restarts = 0 if self.split else machines.RESTARTS
        makers = [machines.worker(self.group, self.kind, self.placed, n, restarts) for n in range(self.count)]
        self.actors = [maker.remote() for maker in makers]
        if self.split:
            import ray

            meeting = ray.get(self.actors[0].meeting.remote(str(self.private) if self.private else None))
            self._all("join", [(meeting, rank, self.count) for rank in range(self.count)])

    def _start_again(self) -> None:
        import ray

        print(f"{self.stage}: a worker was lost; the group starts again", flush=True)
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

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

    def _together(self, method: str, tasks: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """A task for each worker at a time, or the same for all; a worker beyond the last repeats it for nothing."""
        step = 1 if method in self.kind.ALIKE else self.count
        for first in range(0, len(tasks), step):
            numbers = [min(first + (rank if step > 1 else 0), len(tasks) - 1) for rank in range(self.count)]
            found = self._tried(method, [tasks[number] for number in numbers])
            yield from dict(zip(reversed(numbers), reversed(found), strict=True)).items()

    def _tried(self, method: str, tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """By all workers at the same time, and once more by a new group where one was lost."""
        import ray

        for attempt in range(machines.RESTARTS + 1):
            try:
                if not self.actors:
                    self._start_actors()
                return self._all(method, tasks)
            except ray.exceptions.RayActorError:
                if attempt == machines.RESTARTS:
                    raise
                self._start_again()
            except ray.exceptions.RayTaskError as error:  # as if it had happened here
                raise error.cause from error
        raise AssertionError

    def _all(self, method: str, tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results of all ranks. One that fails is told at once: the others wait for it, or fail because of it."""
        import ray

        futures = [getattr(actor, method).remote(*task) for actor, task in zip(self.actors, tasks, strict=True)]
        waiting, failure = futures, None
        while waiting:
            done, waiting = ray.wait(waiting, timeout=FOLLOW if failure else None)
            if not done:
                break
            try:
                ray.get(done)
            except ray.exceptions.RayActorError:  # what the others say follows from it
                raise
            except ray.exceptions.RayTaskError as error:
                failure = failure or error
        if failure:
            raise failure
        return ray.get(futures)
