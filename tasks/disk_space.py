"""How much disk space a stage or a run needs; a stage that cannot finish is refused before it begins."""

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import safe_open

from tasks.config.addresses import local_path
from tasks.config.cluster import Cluster
from tasks.config.params import Params
from tasks.config.paths import BASE, PAIRS, RAW, main_checkout
from tasks.errors import UserError
from tasks.system import disk
from tasks.system.files import read_json_or_empty
from tasks.tracking.registry import LARGEST_UPLOAD
from training.models.model_files import weight_files
from training.trainer.settings import SAVED_MOMENT_BYTES

if TYPE_CHECKING:
    from training.trainer.memory import Sizes

MASTER = 4  # bytes per trainable parameter of the float32 weight
GGUF = {"f16": 2.0, "q8_0": 1.07, "q6_k": 0.9, "q5_k_m": 0.8, "q4_k_m": 0.75}  # bytes per parameter, at most
FolderSizes = list[tuple[Path, float]]  # (folder, bytes)


class Parameters(NamedTuple):
    """How many a model has, and how many are trained."""

    parameters: int
    trainable: int


def check(stage: str, params: Params, cluster: Cluster) -> None:
    """UserError where the disk cannot hold what the stage writes, as far as that is known before."""
    disk.require(stage, _stage_needs(stage, params, cluster))


def _stage_needs(stage: str, params: Params, cluster: Cluster) -> FolderSizes:
    if stage == "source":
        merged_base = disk.size_of(local_path(params.source.model)) if params.source.adapter else 0
        return [(RAW, _source_data(params)), (BASE, float(merged_base))]
    if stage == "prepare":
        return [(PAIRS, 3.0 * disk.size_of(RAW))]  # shards, pairs, the card's quarantine
    if stage == "reference":
        return [(folder, 1.0 * disk.size_of(PAIRS)) for folder in (PAIRS, main_checkout() / cluster.output_dir)]
    if stage == "export":
        return _export_needs(params, cluster)
    return [(Path("data"), 0.0)]


def check_training(stage: str, params: Params, cluster: Cluster, model: Path, folder: Path) -> None:
    """UserError where the disk cannot hold a training in `folder`."""
    try:  # the exact numbers come from transformers' model, which takes seconds to import
        disk.require(stage, _training_needs(params, cluster, _parameters_at_most(params, model), folder))
    except UserError:
        disk.require(stage, _training_needs(params, cluster, _count_parameters(params, model), folder))


def _parameters_at_most(params: Params, model: Path) -> Parameters:
    """From the shapes in the weight files, as if an adapter had all matrices as its targets.

    peft gives experts' fused matrices the rank of each part: twice the rank on the joined outputs.
    """
    adapter, parameters, trainable = params.train.adapter, 0, 0
    for file_name in weight_files(model):
        with safe_open(model / file_name, "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                weight = file.get_slice(name)
                shape, packed = weight.get_shape(), "8" in weight.get_dtype()  # two values of 4 bits in a byte
                size = prod(shape) * (2 if packed else 1)
                parameters += size
                if adapter is None:
                    trainable += size
                elif any(f".{saved}." in f".{name}" for saved in adapter.modules_to_save):  # a trained copy
                    parameters, trainable = parameters + size, trainable + size
                elif len(shape) > 1:
                    *experts, outputs, inputs = shape
                    rank = adapter.rank * (2 if "expert" in name else 1)
                    trainable += prod(experts) * (rank * (outputs + inputs) + outputs)  # DoRA's magnitudes
    return Parameters(parameters, trainable)


def _count_parameters(params: Params, model: Path) -> "Sizes":
    from training.trainer.memory import model_sizes

    adapter = params.train.adapter.model_dump() if params.train.adapter else None
    return model_sizes(model, adapter, params.train.quantization)


def _training_needs(params: Params, cluster: Cluster, sizes: "Parameters | Sizes", folder: Path) -> FolderSizes:
    """Less what earlier attempts left in the folder: their files are replaced one by one."""
    parts = run_needs(params, cluster, sizes)
    policy = parts["policy"] / 3
    return [(folder, max(0.0, parts["checkpoints"] + policy - disk.size_of(folder))), (Path("data"), policy)]


def run_needs(params: Params, cluster: Cluster, sizes: "Parameters | Sizes") -> dict[str, float]:
    """Bytes of a whole run, by content. DVC's cache holds a second copy of every out unless the disk shares blocks."""
    width = 4 if params.train.dtype == "float32" else 2
    merged = sizes.parameters * (4 if params.export.dtype == "float32" else 2)
    saved = (sizes.trainable if params.train.adapter else sizes.parameters) * width
    gguf = sum(sizes.parameters * GGUF[kind] for kind in params.export.gguf)
    pairs = sum(path.stat().st_size for path in PAIRS.glob("*.arrow")) if PAIRS.exists() else 0
    # A new checkpoint is complete before an old one is deleted.
    kept = cluster.actor_train.keep_checkpoints + cluster.actor_train.keep_best + 1
    return {
        "checkpoints": float(sizes.trainable * (width + MASTER + SAVED_MOMENT_BYTES[params.train.optimizer]) * kept),
        "policy": 3.0 * saved,  # in the training folder, as an out, in the cache
        "export": 2.0 * (merged + gguf),
        "registry": float(merged) if merged <= LARGEST_UPLOAD else 0.0,
        "pairs and reference": 5.0 * pairs,
    }


def _source_data(params: Params) -> float:
    from tasks.source.fetch import data_sources  # loads pyarrow, and other stages check their disk space too

    local = [local_path(entry["address"]) for entry in data_sources(params.source) if ":" not in entry["address"]]
    return float(sum(map(disk.size_of, local)))


def _export_needs(params: Params, cluster: Cluster) -> FolderSizes:
    """From the base's weight files, which have at most four bytes per parameter."""
    sizes = read_json_or_empty(BASE / "manifest.json").get("sizes", {})
    weights = float(sum(size for name, size in sizes.items() if name.endswith(".safetensors")))
    exported = weights * (1 + len(params.export.gguf))
    # A worker of another node writes into shared storage, and we move the export from there.
    shared = [] if cluster.ray.address == "local" else [(main_checkout() / cluster.output_dir, exported)]
    return [(Path("data"), exported), *shared]
