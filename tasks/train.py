"""Stage `train`: Ray Train starts the worker group `actor_train`, and each worker trains under DeepSpeed.

This is the driver; tasks/train_worker.py runs on the workers. Checkpoints live outside DVC's outputs, in a folder
named by a hash of everything that determines the weights: the same command after a kill resumes from the last one.
`train.resume_from_checkpoint` names a checkpoint of another training.
"""

import csv
import itertools
import os
import shutil
import socket
import threading
import uuid
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from tasks import continuation, disk_space, stage
from tasks.cluster import system_metrics
from tasks.cluster.nodes import path_on_nodes, refresh_directory, report_node_changes
from tasks.cluster.placement import reserve_placement_group, resource_bundle
from tasks.cluster.ray_cluster import ray_cluster, warn_of_slow_dtype
from tasks.config.params import Cluster, Params, load_cluster, load_params
from tasks.config.paths import METRICS, PAIRS, POLICY, REFERENCE, home
from tasks.dataset.pairs import check_inputs, count_pairs
from tasks.errors import UserError
from tasks.models import base_folder, base_hash
from tasks.reports import plots
from tasks.runs.dvc_lock import stage_code
from tasks.system import disk, signing
from tasks.system.files import fingerprint, hash_files, publish, read_json, write_json
from tasks.system.lock import lock_cached_folder, record_cached_folder
from tasks.system.progress import Bar, meanwhile
from tasks.tracking.journal import Run, read_lines
from tasks.tracking.tensorboard import Events
from tasks.train_worker import FATAL, JOURNAL, PREEMPTED, RESERVE, RESERVE_BYTES, train_on_worker
from training.objectives import batches
from training.objectives.objective import Objective
from training.trainer import checkpoint
from training.trainer.settings import Settings

SPEED_METRICS = ("tokens_per_second", "pairs_per_second", "mfu", "peak_memory_gib", "checkpoint_seconds")


def train(run: Run) -> None:
    params, cluster = load_params(), load_cluster()
    _check_options(params, cluster)
    check_inputs()
    resume, runs = params.train.resume_from_checkpoint, run.folder.parent
    start = (
        None if resume in ("auto", "never") else continuation.find_checkpoint(resume, runs, signing.checkpoint_key())
    )
    origin = _origin(params, run.folder.name, start)
    trainings = home() / cluster.output_dir / "train"
    folder = trainings / continuation.training_hash(origin)
    if start:
        continuation.check_compatible(start, origin)
        run.tags({"resumed_from": str(start), "resumed_from_sha256": origin["start"]})
        if start.parent.parent == trainings.resolve():  # `dpo gc` keeps it as long as this run
            record_cached_folder(start.parent, run.folder, "train")
    (run.folder / continuation.TRAINING_FILE).write_text(str(folder))
    with lock_cached_folder(folder, run.folder, "train"):
        _train(run, params, cluster, folder, origin, start)


def _check_options(params: Params, cluster: Cluster) -> None:
    if params.train.quantization and cluster.actor_train.zero_stage == 3:
        raise UserError(
            "infra/cluster.yaml: actor_train.zero_stage 3 cannot shard a 4-bit base model. Set it to 2, or set "
            "train.quantization and reference.quantization to null."
        )
    if cluster.actor_train.keep_best and not (params.train.select and params.train.eval_steps):
        raise UserError(
            "infra/cluster.yaml: actor_train.keep_best ranks checkpoints by train.select at every train.eval_steps. "
            "Set both in params.yaml, or keep_best to 0."
        )


def _train(
    run: Run, params: Params, cluster: Cluster, folder: Path, origin: dict[str, Any], start: Path | None
) -> None:
    settings = make_settings(params, cluster, base_folder(params.source.model), folder, origin)
    group, adapter, steps = cluster.actor_train, params.train.adapter, origin["steps"]
    print(
        f"train: {steps} steps of {settings.global_batch_size} pairs, "
        f"{f'LoRA of rank {adapter.rank}' if adapter else 'full fine-tuning'}, {group.num_workers} workers, "
        f"ZeRO-{group.zero_stage}, {settings.dtype}",
        flush=True,
    )
    deleted = _delete_checkpoints(folder) if params.train.resume_from_checkpoint == "never" else None
    disk.require("train", disk_space.training_needs(params, cluster, folder))
    checkpoint.claim(folder, settings.attempt)
    key = signing.checkpoint_key()
    if note := deleted or _prepare_start(folder, origin, start, key):
        print(f"train: {note}", flush=True)
    events = Events(run.folder / "tensorboard" if cluster.tensorboard else None)
    with (
        Bar("train", steps, "steps") as bar,
        closing(events),
        meanwhile(partial(forward_metrics, folder / JOURNAL, run, bar, events)),
    ):
        _fit(settings, cluster, folder, bar, key)
    shutil.rmtree(folder / checkpoint.START, ignore_errors=True)
    _publish(run, folder)


def _origin(params: Params, run: str, start: Path | None) -> dict[str, Any]:
    """What determines this training. The cluster does not: another one continues from the same checkpoints."""
    train = params.train
    return {
        "run": run,
        "train": train.model_dump(),
        "steps": batches.total_steps(count_pairs("train"), train.global_batch_size, train.epochs, train.max_steps),
        "base": base_hash(),
        "pairs": fingerprint(hash_files(PAIRS)),
        "reference": fingerprint(read_json(REFERENCE / "manifest.json")),
        "code": stage_code("train", "training/"),
        "start": continuation.checkpoint_hash(start) if start else None,
    }


def _delete_checkpoints(folder: Path) -> str:
    """Delete this training's own checkpoints; a message that names them."""
    names = ", ".join(path.name for path in sorted(folder.glob("step-*")))
    shutil.rmtree(folder, ignore_errors=True)
    return f"starting from step 0; deleted this training's {names}" if names else "starting from step 0"


def _prepare_start(folder: Path, origin: dict[str, Any], start: Path | None, key: bytes) -> str | None:
    """Choose the checkpoint to start from, copying another training's; a message that names it."""
    if last := next(checkpoint.whole_checkpoints(folder, key), None):
        return continuation.describe_resume(last, origin)
    if start:
        checkpoint.adopt(start, folder)
        return continuation.describe_continuation(start, origin)
    return continuation.suggest_checkpoint(folder.parent, origin)


def make_settings(params: Params, cluster: Cluster, model: Path, folder: Path, origin: dict[str, Any]) -> Settings:
    """Settings of a worker. Most have the name of a parameter, and a renamed parameter fails here."""
    train, group, name = params.train, cluster.actor_train, params.source.model
    computed: dict[str, Any] = {
        "model": str(model.resolve()),
        "model_name": name if name.startswith("hub:") else Path(name).name,
        "folder": str(folder),
        "attempt": uuid.uuid4().hex[:8],
        "origin": origin,
        "objective": Objective(train.loss, train.loss_options()),
        "reference_update": train.reference_update.model_dump() if train.reference_update else None,
        "adapter": train.adapter.model_dump() if train.adapter else None,
    }
    names = [field.name for field in fields(Settings) if field.name not in computed]
    in_group = type(group).model_fields
    return Settings(**computed, **{name: getattr(group if name in in_group else train, name) for name in names})


def _fit(settings: Settings, cluster: Cluster, folder: Path, bar: Bar, key: bytes) -> None:
    """Run the worker group to the end. After a dead worker or a lost node it restarts from the last checkpoint."""
    group = cluster.actor_train
    warn_of_slow_dtype("train", settings.dtype, group.gpus_per_worker)
    (folder / FATAL).unlink(missing_ok=True)
    (folder / RESERVE).write_bytes(b" " * RESERVE_BYTES)
    # One CPU more than the workers need: Ray Train's controller takes one.
    with ray_cluster(cluster.ray, group.num_workers * group.cpus_per_worker + 1) as session:
        for start in itertools.count():  # again after each preemption, which is not a failure
            (folder / PREEMPTED).unlink(missing_ok=True)
            trainer = _make_trainer(settings, cluster, folder, key, session, f"{settings.attempt}-{start}")
            try:
                with report_node_changes(cluster.ray, lambda change: bar.say(f"train: {change}")):
                    trainer.fit()
            except Exception as error:
                _raise_fatal(folder, error)
                raise
            refresh_directory(folder)
            if not (folder / PREEMPTED).exists():
                break
    shutil.rmtree(folder / "ray", ignore_errors=True)
    (folder / RESERVE).unlink(missing_ok=True)
    _raise_fatal(folder)


def _make_trainer(
    settings: Settings, cluster: Cluster, folder: Path, key: bytes, session: Path | None, name: str
) -> Any:
    """Ray Train's trainer, as soon as the cluster has room for the group."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from tasks.cluster.rendezvous import Rendezvous  # imports Ray, only possible in a `ray_cluster` block

    group = cluster.actor_train
    # Released at once: Ray Train reserves its own placement group, but would not report that it waits.
    with reserve_placement_group(cluster.ray, group, group.num_workers):
        model, root = path_on_nodes(cluster, Path(settings.model)), path_on_nodes(cluster, Path(), (PAIRS, REFERENCE))

    def train_loop(config: dict[str, Any]) -> None:
        train_on_worker(config, key)  # the key is not in the configuration, which Ray shows on its pages

    return TorchTrainer(
        train_loop,
        train_loop_config={
            "settings": replace(settings, model=str(model)),
            "root": str(root),
            "world": group.num_workers,
            "driver": (socket.gethostname(), os.getpid()),
            "system_metrics": cluster.system_metrics,
        },
        torch_config=Rendezvous(session=str(session) if session else None),
        scaling_config=ScalingConfig(
            num_workers=group.num_workers,
            use_gpu=group.gpus_per_worker > 0,
            resources_per_worker=resource_bundle(group),
            placement_strategy=group.placement,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=group.max_failures),
        ),
    )


def _raise_fatal(folder: Path, cause: Exception | None = None) -> None:
    """UserError if a worker met an error that a restart cannot fix."""
    if (folder / FATAL).exists():
        raise UserError((folder / FATAL).read_text().strip()) from cause


def forward_metrics(journal: Path, run: Run, bar: Bar, events: Events, stop: threading.Event) -> None:
    """Forward what rank 0 writes to the tracking run, the progress bar and TensorBoard, until `stop` is set."""
    offset, stopped, step, usage = 0, False, 0, system_metrics.Reader(journal.parent)
    while not stopped:
        stopped = stop.wait(0.5)
        lines, offset = read_lines(journal, offset)
        for line in lines:
            if line["kind"] == "note":
                bar.say(f"train: {line['text']}")
                continue
            step, values = line["step"], line["values"]
            run.metrics(step, values)
            events.add(step, values)
            if "loss" in values:
                bar.update(step, f"loss {values['loss']:.3f}, reward accuracy {values['rewards/accuracies']:.2f}")
        run.metrics(step, usage.read_new())


def _publish(run: Run, folder: Path) -> None:
    """Write the policy, its curves and its final metrics as DVC outputs."""
    steps = _metrics_by_step(folder / JOURNAL)
    with publish(POLICY) as out:
        shutil.copytree(folder / "policy", out, dirs_exist_ok=True)
    METRICS.mkdir(parents=True, exist_ok=True)
    write_curves(METRICS / "train.csv", steps)
    final = {name: value for row in steps.values() for name, value in row.items() if name not in ("pairs", "tokens")}
    write_json(METRICS / "train.json", final)
    plots.curves(steps, run.folder / "curves.png")
    run.artifact(run.folder / "curves.png")
    run.summary({name: value for name, value in final.items() if not name.startswith("eval/")})


def _metrics_by_step(journal: Path) -> dict[int, dict[str, float]]:
    """The last values of each step, which a restart may repeat; without speeds, which differ from run to run."""
    steps: dict[int, dict[str, float]] = {}
    for line in (line for line in read_lines(journal)[0] if line["kind"] == "metrics"):
        if values := {name: value for name, value in line["values"].items() if name not in SPEED_METRICS}:
            steps.setdefault(line["step"], {}).update(values)
    return dict(sorted(steps.items()))


def write_curves(path: Path, steps: dict[int, dict[str, float]]) -> None:
    columns = sorted({name for row in steps.values() for name in row})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"step": step, **row} for step, row in steps.items())


if __name__ == "__main__":
    stage.main(train)
