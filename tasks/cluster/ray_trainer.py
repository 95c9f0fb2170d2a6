"""Ray Train without helper processes that we do not need, each of which takes two to three seconds of a core to start.

On every cluster: one that splits Ray datasets, which we do not use. On an embedded cluster also one that asks an
autoscaler for nodes, for which the workers would wait, and one that releases the resources of a controller whose
cluster lives on. Import this module inside a `ray_cluster` block.
"""

from typing import Any

from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


class Trainer(DataParallelTrainer):
    HELPERS: tuple[type, ...] = (DatasetsCallback,)

    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, self.HELPERS)]


class EmbeddedTrainer(Trainer):
    HELPERS = (DatasetsCallback, PlacementGroupCleanerCallback)

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        scaling_policy = _FixedSize(options["scaling_policy"].scaling_config)
        return super()._initialize_and_run_controller(**{**options, "scaling_policy": scaling_policy})


class _FixedSize(FixedScalingPolicy):
    """Asks no autoscaler: an embedded cluster never grows."""

    def _send_resource_request(self) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass

    def _cancel_resource_request(self) -> None:
        pass
