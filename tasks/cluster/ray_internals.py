"""The only code that uses private parts of Ray: a trainer for embedded clusters, without three helper processes.

Ray Train starts them for each training, and they cost ten seconds of a core where there may be two
(docs/decisions/2026-11-17-start-of-a-run.md). An embedded cluster needs none of them:

- `DatasetsCallback` splits Ray datasets; our workers read files.
- `PlacementGroupCleanerCallback` frees the resources of a killed controller; this cluster ends with its flow.
- `FixedScalingPolicy` asks an autoscaler for nodes; this cluster never grows.

Any other cluster has the public `DataParallelTrainer`. tests/cluster/test_ray_internals.py fails where an upgrade of
Ray renames one of these parts, or adds a process. Import this module inside a `ray_cluster` block.
"""

from typing import Any

from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

HELPERS = (DatasetsCallback, PlacementGroupCleanerCallback)


class EmbeddedTrainer(DataParallelTrainer):
    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, HELPERS)]

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        policy = FixedSize(options["scaling_policy"].scaling_config)
        return super()._initialize_and_run_controller(**{**options, "scaling_policy": policy})


class FixedSize(FixedScalingPolicy):
    def after_controller_start(self, train_run_context: object) -> None:
        """Does not connect to the autoscaler."""

    def _maybe_send_resource_request(self) -> None:
        pass
