"""What a stage will need: time and memory from earlier runs on the same data and model, training memory from shapes."""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.artifacts import adapters
from tasks.artifacts.models import HUB, REGISTRY, hub_address, hub_snapshot
from tasks.config.addresses import local_path
from tasks.config.cluster import Cluster
from tasks.config.params import Params
from tasks.config.paths import BASE, main_checkout
from tasks.errors import UserError
from tasks.system.files import read_json
from tasks.tracking.journal_reader import read_lines
from tasks.train.driver import make_settings
from training.models.model_files import model_files, weight_files

RUNS = 5  # the newest, whose median counts


@dataclass(frozen=True)
class Needs:
    seconds: float | None
    gib: float | None  # of the stage's largest process
    runs: int  # behind the medians


def measured(runs: Path, params: Params, stage: str) -> Needs:
    """Medians of the newest runs that executed the stage with the same source section."""
    seconds: list[float] = []
    gib: list[float] = []
    for path in sorted(runs.glob("*/stages.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        executed = [state for state in read_json(path) if state["stage"] == stage and state["state"] == "ran"]
        if not executed or len(seconds) == RUNS or not _same_source(path.parent / "params.json", params):
            continue
        seconds.append(float(executed[0]["seconds"]))
        lines = read_lines(path.parent / f"{stage}.jsonl")[0]
        gib += [line["gib"] for line in lines if line["kind"] == "memory"][-1:]
    median = statistics.median
    return Needs(median(seconds) if seconds else None, median(gib) if gib else None, len(seconds))


def _same_source(path: Path, params: Params) -> bool:
    return path.exists() and read_json(path).get("source") == params.source.model_dump()


def worker_memory(params: Params, cluster: Cluster, root: Path, stage: str, longest: int = 0) -> float | None:
    """GiB per worker of train (all of it) and evaluate (the weights alone), computed from the model's shapes.

    None for other stages, and where the model is not on this machine.
    """
    folder = model_on_machine(params.source.model, root)
    if stage not in ("train", "evaluate") or folder is None:
        return None
    if stage == "evaluate":
        return weights_memory(params, cluster, folder, "inference") / 2**30
    return training_memory(params, cluster, folder, longest) / 2**30


def weights_memory(params: Params, cluster: Cluster, folder: Path, name: str) -> float:
    """Bytes of the weights per worker of the group `reference` or `inference`. Activations come on top."""
    from training.trainer import memory  # loads torch, which takes seconds

    dtype, quantization = {
        "reference": (params.reference.dtype, params.reference.quantization),
        "inference": (params.evaluate.dtype, params.train.quantization),
    }[name]
    group, weights = getattr(cluster, name), memory.weight_bytes(folder, dtype, quantization)
    return weights / (group.num_workers if group.zero_stage == 3 else 1)


def training_memory(params: Params, cluster: Cluster, folder: Path, longest: int = 0) -> float:
    """Bytes per worker of train. A pair that is longer than a row's tokens, such as `longest`, is a row of its own."""
    from training.trainer import memory  # loads torch, which takes seconds

    settings = make_settings(params, cluster, folder, main_checkout() / cluster.output_dir, origin={})
    settings = replace(settings, row_tokens=max(settings.row_tokens, longest))
    with adapters.errors_of("train"):
        return float(memory.estimate(settings, cluster.actor_train.num_workers).total)


def adapter(params: Params, root: Path) -> str | None:
    """What train.adapter trains; None without one, or where the model is not on this machine."""
    folder = model_on_machine(params.source.model, root)
    return adapters.describe(folder, "train", params.train) if folder else None


def model_on_machine(address: str, root: Path) -> Path | None:
    """The folder of a base model that needs no download; None if files are missing, as of an interrupted one."""
    folder = root / BASE if address == "demo" or address.startswith(REGISTRY) else local_path(address)
    if address.startswith(HUB):
        folder = _cached_snapshot(address) or folder
    return folder if (folder / "config.json").exists() and _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    try:
        return bool(model_files(folder) and weight_files(folder))
    except ValueError:  # a file that its index names is missing
        return False


def _cached_snapshot(address: str) -> Path | None:
    name, revision = hub_address(address)
    try:
        return hub_snapshot(name, revision, local_files_only=True)
    except (UserError, OSError, ValueError):
        return None
