"""A training on the worker group `actor_train`: Ray Train starts the workers, and each trains under DeepSpeed.

This is the driver, for the stages `train` and `sft`; tasks/train/worker.py runs on the workers. Checkpoints live
outside DVC's outputs, in a folder named by a hash of everything that determines the weights: the same command after a
kill resumes from the last one. `resume_from_checkpoint` names a checkpoint of another training.
"""

import itertools
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from tasks import disk_space
from tasks.artifacts.training_data import TrainingData
from tasks.cluster.nodes import path_on_nodes, refresh_directory, report_node_changes
from tasks.cluster.placement import reserve_placement_group, resource_bundle
from tasks.cluster.ray_cluster import ray_cluster, warn_of_slow_dtype
from tasks.config.cluster import Cluster
from tasks.config.params import Params
from tasks.config.paths import main_checkout
from tasks.config.train import Optimization
from tasks.errors import UserError
from tasks.system import signing
from tasks.system.code import worker_code
from tasks.system.lock import lock_cached_folder, record_cached_folder
from tasks.system.processes import this_process
from tasks.system.progress import Bar, background_thread
from tasks.tracking.journal import StageJournal
from tasks.tracking.tensorboard import Events
from tasks.train import continuation
from tasks.train.progress import name_keys, show_progress
from tasks.train.worker import FATAL, JOURNAL, PREEMPTED, RESERVE, RESERVE_BYTES, train_on_worker
from training.pairs import batches
from training.trainer import checkpoint_files
from training.trainer.settings import Settings


@dataclass(frozen=True)
class Training:
    """What a stage trains. In the parameters of the stage `sft`, its section takes the place of `train`."""

    stage: str
    params: Params
    cluster: Cluster
    model: Path
    data: TrainingData
    inputs: Mapping[str, str | None]  # hashes of the base model, the pairs and the reference values


@contextmanager
def train_locked(training: Training, run: StageJournal) -> Iterator[Path]:
    """Train, or continue a training; yields its folder with the result in `policy`, locked against other runs."""
    params, cluster, stage = training.params, training.cluster, training.stage
    resume, runs = params.train.resume_from_checkpoint, run.folder.parent
    start = (
        None if resume in ("auto", "never") else continuation.find_checkpoint(resume, runs, signing.checkpoint_key())
    )
    origin = _origin(training, run.folder.name, start)
    trainings = main_checkout() / cluster.output_dir / stage
    folder = trainings / continuation.training_hash(origin)
    if start:
        continuation.check_compatible(start, origin)
        run.tags({"resumed_from": str(start), "resumed_from_sha256": origin["start"]})
        if start.parent.parent == trainings.resolve():  # `dpo gc` keeps it as long as this run
            record_cached_folder(start.parent, run.folder, stage)
    if stage == "train":
        (run.folder / continuation.TRAINING_FILE).write_text(str(folder))
    with lock_cached_folder(folder, run.folder, stage):
        _train(training, run, folder, origin, start)
        yield folder


def check_options(stage: str, train: Optimization, cluster: Cluster) -> None:
    """UserError if params.yaml and infra/cluster.yaml do not fit together."""
    group = cluster.actor_train
    if train.quantization and group.zero_stage == 3:
        raise UserError(
            "infra/cluster.yaml: actor_train.zero_stage 3 cannot shard a quantized base model. Set it to 2, or set "
            f"{stage}.quantization and reference.quantization to null."
        )
    if train.adapter and group.zero_stage == 3 and (train.adapter.init == "pissa" or train.adapter.modules_to_save):
        raise UserError(
            "infra/cluster.yaml: actor_train.zero_stage 3 shards the weights that adapter.init: pissa and "
            f"modules_to_save need whole. Set it to 2, or {stage}.adapter.init to zero and modules_to_save to []."
        )
    if group.tensor_parallel > 1 and train.quantization:
        raise UserError(
            f"infra/cluster.yaml: actor_train.tensor_parallel {group.tensor_parallel} cannot split a quantized base "
            f"model. Set it to 1, or {stage}.quantization and reference.quantization to null."
        )
    if group.tensor_parallel > 1 and train.adapter and (train.adapter.use_dora or train.adapter.dropout):
        raise UserError(
            f"infra/cluster.yaml: actor_train.tensor_parallel {group.tensor_parallel} splits the weights that "
            "adapter.use_dora needs whole, and the inputs of adapter.dropout. Set it to 1, or "
            f"{stage}.adapter.use_dora to false and {stage}.adapter.dropout to 0."
        )
    if group.keep_best and not (train.select and train.eval_steps):
        raise UserError(
            f"infra/cluster.yaml: actor_train.keep_best ranks checkpoints by {stage}.select at every "
            f"{stage}.eval_steps. Set both in params.yaml, or keep_best to 0."
        )


def _train(training: Training, run: StageJournal, folder: Path, origin: dict[str, Any], start: Path | None) -> None:
    params, cluster, stage = training.params, training.cluster, training.stage
    settings = make_settings(params, cluster, training.model, folder, origin)
    group, adapter, steps = cluster.actor_train, params.train.adapter, origin["steps"]
    workers = "1 worker" if group.num_workers == 1 else f"{group.num_workers} workers"
    shared = f" ({group.sequence_parallel} share each row)" if group.sequence_parallel > 1 else ""
    shared = f" ({group.tensor_parallel} share each layer)" if group.tensor_parallel > 1 else shared
    print(
        f"{stage}: {steps} steps of {settings.global_batch_size} "
        f"{'pairs' if training.data.preferences else 'answers'}, "
        f"{f'LoRA of rank {adapter.rank}' if adapter else 'full fine-tuning'}, {workers}{shared}, "
        f"ZeRO-{group.zero_stage}, {settings.dtype}",
        flush=True,
    )
    deleted = _delete_checkpoints(folder) if params.train.resume_from_checkpoint == "never" else None
    disk_space.check_training(stage, params, cluster, training.model, folder)
    checkpoint_files.claim(folder, settings.attempt)
    key = signing.checkpoint_key()
    if note := deleted or _prepare_start(folder, origin, start, key):
        print(f"{stage}: {name_keys(note, stage)}", flush=True)
    events = Events(run.folder / "tensorboard" if cluster.tensorboard and stage == "train" else None)
    with (
        Bar(stage, steps, "steps") as bar,
        closing(events),
        run.including(folder),
        background_thread(partial(show_progress, folder / JOURNAL, stage, bar, events)),
    ):
        _fit(training, settings, folder, bar, key)
    shutil.rmtree(folder / checkpoint_files.START, ignore_errors=True)


def _origin(training: Training, run: str, start: Path | None) -> dict[str, Any]:
    """Everything that determines this training. Not the cluster: another one continues from the same checkpoints."""
    train = training.params.train
    pairs = len(training.data.read("train"))
    return {
        "run": run,
        "train": train.model_dump(),
        "steps": batches.total_steps(pairs, train.global_batch_size, train.epochs, train.max_steps),
        **training.inputs,
        "code": worker_code("train"),
        "start": continuation.checkpoint_hash(start) if start else None,
    }


def _delete_checkpoints(folder: Path) -> str:
    """Delete this training's own checkpoints; a message that names them."""
    names = ", ".join(path.name for path in sorted(folder.glob("step-*")))
    shutil.rmtree(folder, ignore_errors=True)
    return f"starting from step 0; deleted this training's {names}" if names else "starting from step 0"


def _prepare_start(folder: Path, origin: dict[str, Any], start: Path | None, key: bytes) -> str | None:
    """Choose the checkpoint to start from, copying another training's; a message that names it."""
    if last := next(checkpoint_files.whole_checkpoints(folder, key), None):
        return continuation.describe_resume(last, origin)
    if start:
        checkpoint_files.adopt(start, folder)
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
        "loss_options": train.loss_options(),
        "reference_update": train.reference_update.model_dump() if train.reference_update else None,
        "adapter": train.adapter.model_dump() if train.adapter else None,
    }
    names = [field.name for field in fields(Settings) if field.name not in computed]
    in_group = type(group).model_fields
    return Settings(**computed, **{name: getattr(group if name in in_group else train, name) for name in names})


def _fit(training: Training, settings: Settings, folder: Path, bar: Bar, key: bytes) -> None:
    """Run the worker group to the end. After a dead worker or a lost node it restarts from the last checkpoint."""
    cluster, group, stage = training.cluster, training.cluster.actor_train, training.stage
    warn_of_slow_dtype(stage, settings.dtype, group.gpus_per_worker)
    (folder / FATAL).unlink(missing_ok=True)
    (folder / RESERVE).write_bytes(b" " * RESERVE_BYTES)
    # One CPU more than the workers need: Ray Train's controller takes one.
    with ray_cluster(cluster.ray, group.cpus + 1) as session:
        for start in itertools.count():  # again after each preemption, which is not a failure
            (folder / PREEMPTED).unlink(missing_ok=True)
            trainer = _make_trainer(training, settings, folder, key, session, f"{settings.attempt}-{start}")
            try:
                with report_node_changes(cluster.ray, lambda change: bar.say(f"{stage}: {change}")):
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
    training: Training, settings: Settings, folder: Path, key: bytes, session: Path | None, name: str
) -> Any:
    """Ray Train's trainer, as soon as the cluster has room for the group."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from tasks.cluster.ray_internals import EmbeddedTrainer  # imports Ray, only possible in a `ray_cluster`
    from tasks.cluster.rendezvous import Rendezvous  # as above

    cluster, group = training.cluster, training.cluster.actor_train
    # Released at once: Ray Train reserves its own placement group, but would not report that it waits.
    with reserve_placement_group(cluster.ray, group, group.num_workers):
        model = path_on_nodes(cluster, Path(settings.model))
        root = path_on_nodes(cluster, Path(), training.data.folders)

    def train_loop(config: dict[str, Any]) -> None:
        train_on_worker(config, key)  # the key is not in the configuration, which Ray shows on its pages

    trainer: Any = EmbeddedTrainer if session else DataParallelTrainer
    return trainer(
        train_loop,
        train_loop_config={
            "settings": replace(settings, model=str(model)),
            "root": str(root),
            "data": training.data,
            "world": group.num_workers,
            "driver": this_process(),
            "system_metrics": cluster.system_metrics,
        },
        backend_config=Rendezvous(session=str(session) if session else None),
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
