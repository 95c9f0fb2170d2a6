"""What a stage will need, from what earlier runs on the same data and model took; training's memory from its shapes."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import UserError
from tasks.files import home, read_json
from tasks.params import Cluster, Params
from tasks.paths import BASE
from tasks.tracking.journal import read_lines

RUNS = 5  # of the newest ones, whose median counts


@dataclass(frozen=True)
class Needs:
    seconds: float | None
    gib: float | None  # of its largest process
    runs: int  # that were asked


def measured(runs: Path, params: Params, stage: str) -> Needs:
    """Of the newest runs that executed the stage with the same source section."""
    seconds: list[float] = []
    gib: list[float] = []
    for path in sorted(runs.glob("*/stages.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        ran = [one for one in read_json(path) if one["stage"] == stage and one["state"] == "ran"]
        if not ran or len(seconds) == RUNS or not _same_source(path.parent / "params.json", params):
            continue
        seconds.append(float(ran[0]["seconds"]))
        lines = read_lines(path.parent / f"{stage}.jsonl")[0]
        gib += [line["gib"] for line in lines if line["kind"] == "memory"][-1:]
    middle = statistics.median
    return Needs(middle(seconds) if seconds else None, middle(gib) if gib else None, len(seconds))


def _same_source(path: Path, params: Params) -> bool:
    return path.exists() and read_json(path).get("source") == params.source.model_dump()


def worker_memory(params: Params, cluster: Cluster, root: Path, stage: str) -> float | None:
    """GiB on each worker of the stages train and evaluate, counted from the model's shapes.

    Of evaluate the weights alone. None for other stages, and where the model is not here.
    """
    from tasks.models import local_path
    from tasks.train import make_settings
    from training import memory

    folder = root / BASE if params.source.model == "demo" else local_path(params.source.model)
    if params.source.model.startswith("hub:"):
        folder = _hub(params, root) or folder
    if stage not in ("train", "evaluate") or not (folder / "config.json").exists():
        return None
    if stage == "evaluate":
        weights = memory.weights(folder, params.evaluate.dtype, params.train.quantization) / 2**30
        return weights / (cluster.evaluate.num_workers if cluster.evaluate.zero_stage == 3 else 1)
    settings = make_settings(params, cluster, folder, home() / cluster.output_dir, origin={})
    return memory.estimate(settings, cluster.actor_train.num_workers).total / 2**30


def _hub(params: Params, root: Path) -> Path | None:
    from tasks.models import hub_address, hub_snapshot

    name, revision = hub_address(params.source.model)
    try:
        return hub_snapshot(name, revision, local_files_only=True)
    except (UserError, OSError, ValueError):
        return None
