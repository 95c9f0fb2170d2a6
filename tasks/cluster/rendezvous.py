"""How training workers start: they handle SIGTERM and form a process group.

On an embedded cluster the ranks find each other through a file: torch's TCPStore listens on every interface and accepts
writes from anyone. Import this module inside a `ray_cluster` block.
"""

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.backend import BackendConfig
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend

from tasks.cluster import preemption


@dataclass
class Rendezvous(TorchConfig):
    """Ray Train's torch backend; with torch's file store in the private session folder of an embedded cluster."""

    session: str | None = None

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, Rendezvous)
        worker_group.execute(preemption.handle_sigterm)
        if backend_config.session is None:
            super().on_start(worker_group, backend_config)
            return
        store = Path(backend_config.session) / f"ranks-{uuid.uuid4().hex}"  # a new one after each restart
        gpus = worker_group.get_resources_per_worker().get("GPU", 0)
        worker_group.execute(_set_torch_distributed_env_vars)
        futures: list[Any] = [
            worker_group.execute_single_async(
                rank,
                _setup_torch_process_group,
                backend="nccl" if gpus else "gloo",
                world_rank=rank,
                world_size=len(worker_group),
                init_method=f"file://{store}",
                timeout_s=backend_config.timeout_s,
            )
            for rank in range(len(worker_group))
        ]
        ray.get(futures)
