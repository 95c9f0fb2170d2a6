"""The typed view of infra/cluster.yaml: what changes only place and speed."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tasks.configuration import Count, Positive, Section

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Resources = dict[Annotated[str, Field(pattern=r"^[a-zA-Z]\w*$")], Positive]


class Ray(Section):
    address: str = "local"
    interface: str | None = None
    env: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _an_address_is_one_that_ray_train_can_use(self) -> "Ray":
        if self.address not in ("local", "auto") and not re.fullmatch(r"[\w.-]+:\d+", self.address):
            raise ValueError(
                f"address is '{self.address}', and it must be `local`, the head's host:port as 10.0.0.1:6379, or "
                "`auto`: the cluster that this machine is a node of (not ray://, the driver runs on a node)"
            )
        if self.address == "local" and self.interface:
            raise ValueError("`interface` has no effect on address local: set it to null")
        return self


class PrepareGroup(Section):
    num_workers: Count | None = None


class Group(Section):
    """Workers on Ray that hold a model."""

    num_workers: Count = 1
    cpus_per_worker: Positive = 1
    gpus_per_worker: Annotated[float, Field(ge=0.0)] = 0
    resources: Resources = Field(default_factory=dict)
    placement: Placement = "PACK"
    row_tokens: Annotated[int, Field(ge=64)] = 8192
    compile: bool = True


class ReferenceGroup(Group):
    shard_pairs: Count = 512


class ActorTrainGroup(Group):
    zero_stage: Literal[1, 2, 3] = 2
    offload: Literal["none", "optimizer", "all"] = "none"
    activation_checkpointing: bool = False
    save_steps: Count = 100
    keep_checkpoints: Count = 2
    resume_from_checkpoint: Literal["auto", "never"] = "auto"
    max_failures: Annotated[int, Field(ge=0)] = 2

    @model_validator(mode="after")
    def _parameters_leave_the_device_under_zero_3_alone(self) -> "ActorTrainGroup":
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(f"offload: all needs zero_stage: 3, and zero_stage is {self.zero_stage}")
        return self


class Cluster(Section):
    exp_name: str = "dpo"
    tracking_uri: str = "sqlite:///.mlflow/mlflow.db"
    logging_dir: str = ".scratch/runs"
    tensorboard: bool = False
    output_dir: str = ".scratch"
    ray: Ray = Ray()
    prepare: PrepareGroup = PrepareGroup()
    reference: ReferenceGroup = ReferenceGroup()
    actor_train: ActorTrainGroup = ActorTrainGroup()
