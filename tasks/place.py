"""Where a run works and how fast: the schema of infra/cluster.yaml, and how the file and its overlays are resolved.

Every reader calls `load_cluster`. Later layers win:

1. infra/cluster.yaml, which holds every key (the schema has no defaults);
2. the site's overlay, the file that DPO_CLUSTER names;
3. the recipe's `cluster` part; a run keeps it in its worktree and its commit as infra/recipe.yaml;
4. overrides.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tasks.configuration import Count, Positive, Section, lay_over, read_yaml, validate
from tasks.errors import UserError
from tasks.files import home

CLUSTER = Path("infra/cluster.yaml")  # relative: a stage runs in the root of its workspace
RECIPE = Path("infra/recipe.yaml")  # in a run's worktree
SITE = "DPO_CLUSTER"
Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Resources = dict[Annotated[str, Field(pattern=r"^[a-zA-Z]\w*$")], Positive]


class Ray(Section):
    address: str
    interface: str | None
    env: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str]

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


class Access(Section):
    """What run parameters may name (tasks/access.py)."""

    judge_keys: list[Annotated[str, Field(pattern=r"^\w+$")]]
    judge_origins: list[Annotated[str, Field(pattern=r"^https?://[\w.:\[\]-]+$")]]
    protocols: list[Annotated[str, Field(pattern=r"^\w+$")]]
    networks: list[str]
    push: list[Annotated[str, Field(pattern=r"^\w+://\S+$")]]

    @model_validator(mode="after")
    def _networks_are_addresses(self) -> "Access":
        for network in self.networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"networks: {error}. Write an address or a range, as 10.1.2.3 or 10.0.0.0/8") from None
        return self


class PrepareGroup(Section):
    num_workers: Count | None


class Group(Section):
    """Workers on Ray that hold a model."""

    num_workers: Count
    cpus_per_worker: Positive
    gpus_per_worker: Annotated[float, Field(ge=0.0)]
    resources: Resources
    placement: Placement
    row_tokens: Annotated[int, Field(ge=64)]
    compile: bool


class ReferenceGroup(Group):
    shard_pairs: Count


class ActorTrainGroup(Group):
    zero_stage: Literal[1, 2, 3]
    offload: Literal["none", "optimizer", "all"]
    activation_checkpointing: bool
    save_steps: Count
    keep_checkpoints: Count
    keep_best: Annotated[int, Field(ge=0)]
    max_failures: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _parameters_leave_the_device_under_zero_3_alone(self) -> "ActorTrainGroup":
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(f"offload: all needs zero_stage: 3, and zero_stage is {self.zero_stage}")
        return self


class Cluster(Section):
    exp_name: str
    tracking_uri: str
    logging_dir: str
    tensorboard: bool
    output_dir: str
    access: Access
    ray: Ray
    prepare: PrepareGroup
    reference: ReferenceGroup
    actor_train: ActorTrainGroup


def load_cluster(root: Path = Path(), *over: Mapping[str, Any]) -> Cluster:
    """What applies in the workspace `root`; `over` are more layers: a recipe's part that is only planned, overrides."""
    recipe = read_yaml(root / RECIPE) if (root / RECIPE).exists() else {}
    if "access" in recipe:
        raise UserError(f"{root / RECIPE}: a recipe cannot set `access`. Set it in {CLUSTER} or the site's overlay.")
    content = read_yaml(root / CLUSTER)
    for layer in (site_overlay(), recipe, *over):
        content = lay_over(content, dict(layer), Cluster)
    site = f" with {SITE}={os.environ[SITE]}" if os.environ.get(SITE) else ""
    return validate(Cluster, content, Path(f"{root / CLUSTER}{site}"))


def site_overlay() -> dict[str, Any]:
    """What the site changes on all its machines; a relative path starts at the main checkout."""
    if not (given := os.environ.get(SITE)):
        return {}
    if not (path := home() / given).is_file():
        raise UserError(f"There is no file {path}, and {SITE} names it. Correct the path, or unset {SITE}.")
    return read_yaml(path)
