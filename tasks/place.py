"""The typed view of infra/cluster.yaml: what changes only place and speed."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tasks.configuration import Count, Positive, Section


class Ray(Section):
    address: str = "local"


class PrepareGroup(Section):
    num_workers: Count | None = None


class ReferenceGroup(Section):
    num_workers: Count = 1
    cpus_per_worker: Positive = 1
    gpus_per_worker: Annotated[float, Field(ge=0.0)] = 0
    row_tokens: Annotated[int, Field(ge=64)] = 8192
    shard_pairs: Count = 512
    compile: bool = True


class ActorTrainGroup(Section):
    num_workers: Count = 1
    cpus_per_worker: Positive = 1
    gpus_per_worker: Annotated[float, Field(ge=0.0)] = 0
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    zero_stage: Literal[1, 2, 3] = 2
    offload: Literal["none", "optimizer", "all"] = "none"
    row_tokens: Annotated[int, Field(ge=64)] = 8192
    activation_checkpointing: bool = False
    compile: bool = True
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
