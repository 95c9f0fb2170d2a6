"""The schema of infra/cluster.yaml (where a run executes and how fast), and the layers that override each other.

`load_cluster` returns the values, `changed_values` the origin of each that is not a default. Later layers win:

1. the defaults of the schema below;
2. infra/cluster.yaml;
3. the site overlay, the file that DPO_CLUSTER names;
4. the recipe's `cluster` part;
5. overrides, such as `cluster.actor_train.num_workers`.

A run keeps the last two, merged, as infra/overrides.yaml in its worktree and its commit.
"""

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.config.paths import main_checkout
from tasks.config.strict import Count, Layer, Positive, Section, Value, changed, merge, read_yaml, section, validate
from tasks.errors import UserError

CLUSTER = Path("infra/cluster.yaml")  # relative: a stage runs in the root of its workspace
OVERRIDES = Path("infra/overrides.yaml")  # in a run's worktree: its recipe's cluster part and its overrides
RUN_FILES = (Path("infra/recipe.yaml"), OVERRIDES)  # runs of earlier versions have their recipe's part in a file
SITE = "DPO_CLUSTER"
RENAMED = {"evaluate": "inference"}  # worker groups, by the name that files of stored runs may have
Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
PROTOCOLS = ["file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"]
OF_THIS_MACHINE = {  # of fsspec: they read local files, too, past the checks of tasks/config/addresses.py
    *("async_wrapper", "asynclocal", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir", "dvc", "filecache"),
    *("generic", "git", "jlab", "jupyter", "libarchive", "local", "memory", "pyscript", "reference", "simplecache"),
    *("tar", "zip"),
}
Resources = dict[Annotated[str, Field(pattern=r"^[a-zA-Z]\w*$")], Positive]


class Ray(Section):
    address: str = "local"
    interface: str | None = None
    env: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str] = Field(default={})

    def check(self) -> None:
        if self.address not in ("local", "auto") and not re.fullmatch(r"[\w.-]+:\d+", self.address):
            raise ValueError(
                f"address is '{self.address}', but it must be `local`, the head node's host:port (10.0.0.1:6379), or "
                "`auto` for the cluster that this machine belongs to (not ray://: the driver runs on a node)"
            )
        if self.address == "local" and self.interface:
            raise ValueError("`interface` has no effect on address local: set it to null")


class Access(Section):
    """What a run may use (tasks/config/access.py)."""

    judge_keys: list[Annotated[str, Field(pattern=r"^\w+$")]] = Field(default=["JUDGE_KEY"])
    judge_origins: list[Annotated[str, Field(pattern=r"^https?://[\w.:\[\]-]+$")]] = Field(default=[])
    protocols: list[Annotated[str, Field(pattern=r"^\w+$")]] = Field(default=PROTOCOLS)
    networks: list[str] = Field(default=[])
    push: list[Annotated[str, Field(pattern=r"^\w+://\S+$")]] = Field(default=[])

    def check(self) -> None:
        for protocol in OF_THIS_MACHINE.intersection(self.protocols):
            raise ValueError(f"protocols: `{protocol}` reads files of this machine. Use `file` for them")
        for network in self.networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(
                    f"networks: {error}. Write an address or a range, such as 10.1.2.3 or 10.0.0.0/8"
                ) from None


class PrepareGroup(Section):
    num_workers: Count | None = None


class Group(Section):
    """Ray workers that each hold a model, or a shard of one."""

    num_workers: Count = 1
    cpus_per_worker: Positive = 1
    gpus_per_worker: Annotated[float, Field(ge=0.0)] = 0
    resources: Resources = Field(default={})
    placement: Placement = "PACK"
    row_tokens: Annotated[int, Field(ge=64)] = 1024

    @property
    def cpus(self) -> float:
        """Of all workers."""
        return self.num_workers * self.cpus_per_worker


class ReferenceGroup(Group):
    shard_pairs: Count = 128
    compile: bool = True
    zero_stage: Literal[0, 3] = 0


class ActorTrainGroup(Group):
    num_workers: Count = 2
    compile: bool = True
    zero_stage: Literal[1, 2, 3] = 2
    offload: Literal["none", "optimizer", "all"] = "none"
    activation_checkpointing: bool | Literal["offload"] = False
    mlp_tile_tokens: Count | None = None
    sequence_parallel: Count = 1
    tensor_parallel: Count = 1
    save_steps: Count = 20
    keep_checkpoints: Count = 2
    keep_best: Annotated[int, Field(ge=0)] = 0
    max_failures: Annotated[int, Field(ge=0)] = 2

    def check(self) -> None:
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(f"offload: all needs zero_stage: 3, but zero_stage is {self.zero_stage}")
        if self.mlp_tile_tokens and self.zero_stage == 3:
            raise ValueError(
                "mlp_tile_tokens does not work with zero_stage: 3, where workers with different numbers of tiles would "
                "wait for each other. Use sequence_parallel, or zero_stage: 2"
            )
        for name, shared in (("sequence_parallel", "tokens of a row"), ("tensor_parallel", "weights of each layer")):
            size = getattr(self, name)
            if self.num_workers % size:
                raise ValueError(
                    f"{name} is {size} and num_workers is {self.num_workers}: every {size} workers share the {shared}, "
                    "so num_workers must be a multiple of it"
                )
        if self.tensor_parallel > 1 and self.sequence_parallel > 1:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel} and sequence_parallel is {self.sequence_parallel}, which "
                "exclude each other. Set one of them to 1: tensor_parallel for layers that are too large, "
                "sequence_parallel for rows that are too long"
            )


class InferenceGroup(Group):
    zero_stage: Literal[0, 3] = 0
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9


class Cluster(Section):
    exp_name: str = "dpo"
    tracking_uri: str = "sqlite:///.mlflow/mlflow.db"
    logging_dir: str = ".scratch/runs"
    tensorboard: bool = False
    wandb_project: Annotated[str, Field(min_length=1)] | None = None
    system_metrics: Positive | None = 10
    output_dir: str = ".scratch"
    price_per_gpu_hour: Positive | None = None
    currency: Annotated[str, Field(pattern=r"^[A-Za-z]{1,8}$")] = "EUR"
    access: Access = Access()
    ray: Ray = Ray()
    prepare: PrepareGroup = PrepareGroup()
    reference: ReferenceGroup = ReferenceGroup()
    actor_train: ActorTrainGroup = ActorTrainGroup()
    inference: InferenceGroup = InferenceGroup()


def load_cluster(root: Path = Path(), *over: Mapping[str, Any]) -> Cluster:
    """The configuration of the workspace `root`, with `over` as further layers."""
    return validated([*cluster_layers(root), *(Layer("override", content) for content in over)], root)


def changed_values(root: Path = Path()) -> dict[str, Value]:
    """The values that are not the schema's defaults, by dotted name, each with its origin."""
    return changed(cluster_layers(root), Cluster)


def cluster_layers(root: Path) -> list[Layer]:
    """Of the workspace `root`; in a run's worktree with the run's own."""
    return [*operator_layers(root), *run_layers(root)]


def operator_layers(root: Path) -> list[Layer]:
    """What this machine decides: the same for all runs."""
    layers = [Layer("default", Cluster().model_dump()), Layer(str(CLUSTER), _read(root, CLUSTER))]
    content = site_overlay()
    return [*layers, *([Layer(f"{os.environ[SITE]} ({SITE})", content)] if content else [])]


def run_layers(root: Path) -> list[Layer]:
    """What the run of the worktree `root` has of its own."""
    layers = [Layer(str(path), _read(root, path)) for path in RUN_FILES if (root / path).exists()]
    for layer in layers:
        if "access" in layer.content:
            raise UserError(
                f"{root / layer.origin}: a recipe cannot set `access`, and neither can an override. Set it in "
                f"{CLUSTER} or the site overlay."
            )
    return layers


def validated(layers: Sequence[Layer], root: Path) -> Cluster:
    site = f" with {SITE}={os.environ[SITE]}" if os.environ.get(SITE) else ""
    return validate(Cluster, merge(layers, Cluster), Path(f"{root / CLUSTER}{site}"))


def _read(root: Path, path: Path) -> dict[str, Any]:
    content = read_yaml(root / path)
    if root.resolve() != main_checkout():  # a run's worktree: nobody edits its files
        return rename_groups(content, RENAMED)
    refuse_renamed(content, str(path))
    return content


def rename_groups(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in content.items()}


def refuse_renamed(content: Iterable[str], where: str) -> None:
    """UserError if these sections of `where` include one that has another name now."""
    for old in RENAMED.keys() & set(content):
        raise UserError(f"{where}: the worker group `{old}` is now `{RENAMED[old]}`. Rename it there; its keys stay.")


def groups() -> list[str]:
    """The sections whose keys a run may override; the operator owns the rest."""
    sections = ((name, section(Cluster, name)) for name in Cluster.model_fields)
    return [name for name, kind in sections if kind and issubclass(kind, Group | PrepareGroup)]


def site_overlay() -> dict[str, Any]:
    """The site's changes for all its machines; a relative path starts at the main checkout.

    The operator names the file: it may be where no address of a run may lead.
    """
    if not (name := os.environ.get(SITE)):
        return {}
    if not (path := main_checkout() / name).is_file():
        raise UserError(f"{SITE} names {path}, which does not exist. Correct the path, or unset {SITE}.")
    content = read_yaml(path)
    refuse_renamed(content, f"{path} ({SITE})")
    return content
