"""How training workers start: they handle SIGTERM and form a process group.

Like the torch backend of Ray Train, which loads torch in the driver and in the controller too: three seconds each, one
after the other, before the workers start. Only workers load it here.

On an embedded cluster the ranks find each other through a file: torch's TCPStore listens on every interface and accepts
writes from anyone. Import this module inside a `ray_cluster` block.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import train
from ray.train.backend import Backend, BackendConfig

from tasks.cluster import preemption
from tasks.cluster.store import store_address

LEAVE_TIMEOUT = 30.0  # seconds for the ranks to leave their group


@dataclass
class Rendezvous(BackendConfig):
    session: str | None = None  # the private folder of an embedded cluster

    @property
    def backend_cls(self) -> type[Backend]:
        return _Backend

    @property
    def train_func_context(self) -> Any:
        return _own_device


@contextmanager
def _own_device() -> Iterator[None]:
    """A worker's code runs on its own GPU."""
    from ray.train.torch import get_device

    from training.distributed.process_group import use_device

    use_device(get_device())
    yield


class _Backend(Backend):
    share_cuda_visible_devices = True  # so that NCCL reaches the other GPUs of the host directly

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, Rendezvous)
        worker_group.execute(preemption.handle_sigterm)
        store = worker_group.execute_single(0, store_address, backend_config.session)  # new after each restart
        on_gpu = worker_group.get_resources_per_worker().get("GPU", 0) > 0
        ray.get(worker_group.execute_async(_join, store, on_gpu))

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        if len(worker_group) > 1:
            futures = worker_group.execute_async(_leave)
            ray.wait(futures, num_returns=len(futures), timeout=LEAVE_TIMEOUT)


def _join(store: str, on_gpu: bool) -> None:
    """Form the process group, with torchrun's variables."""
    from training.distributed.process_group import form_process_group

    ranks = train.get_context()
    os.environ.update(LOCAL_RANK=str(ranks.get_local_rank()), LOCAL_WORLD_SIZE=str(ranks.get_local_world_size()))
    form_process_group(store, ranks.get_world_rank(), ranks.get_world_size(), on_gpu)


def _leave() -> None:
    from training.distributed.process_group import leave_process_group

    leave_process_group()
