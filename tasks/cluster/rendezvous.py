"""How training workers start: they handle SIGTERM and form a process group.

Like the torch backend of Ray Train, which loads torch in the driver and in the controller too: three seconds each, one
after the other, before the workers start. Only workers load it here.

On an embedded cluster the ranks find each other through a file: torch's TCPStore listens on every interface and accepts
writes from anyone. Import this module inside a `ray_cluster` block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.util import TrainingFramework

from tasks.cluster import preemption
from tasks.cluster.store import store_address

TIMEOUT = 1800  # seconds of a collective
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

    @property
    def framework(self) -> TrainingFramework:
        return TrainingFramework.TORCH


@contextmanager
def _own_device() -> Iterator[None]:
    """A worker's code runs on its own GPU."""
    from ray.train.torch.config import TorchConfigContextManager

    with TorchConfigContextManager():
        yield


class _Backend(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, Rendezvous)
        worker_group.execute(preemption.handle_sigterm)
        store = worker_group.execute_single(0, store_address, backend_config.session)  # new after each restart
        backend = "nccl" if worker_group.get_resources_per_worker().get("GPU", 0) else "gloo"
        ranks = range(len(worker_group))
        joined: list[Any] = [
            worker_group.execute_single_async(rank, _join, backend, rank, len(ranks), store) for rank in ranks
        ]
        ray.get(joined)

    def on_shutdown(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        futures: list[Any] = worker_group.execute_async(_leave, len(worker_group) > 1)
        ray.wait(futures, num_returns=len(futures), timeout=LEAVE_TIMEOUT)


def _join(backend: str, rank: int, world_size: int, store: str) -> None:
    from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group

    _set_torch_distributed_env_vars()
    _setup_torch_process_group(backend, rank, world_size, store, TIMEOUT)


def _leave(has_group: bool) -> None:
    from ray.train.torch.config import _shutdown_torch

    _shutdown_torch(destroy_process_group=has_group)
