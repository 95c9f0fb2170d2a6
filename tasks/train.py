"""Stage `train`: Ray Train starts the worker group `actor_train`, each worker runs training.loop under DeepSpeed.

Checkpoints live outside DVC's outs, in a folder named by a hash of everything that determines the weights: the same
command after a kill resumes from the last one. `train.resume_from_checkpoint` names one of another training.
"""

import csv
import itertools
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tasks import continuation, disk, signing, stage
from tasks.dataset.pairs import check_inputs, count_pairs, read_pairs, read_sources, with_reference
from tasks.errors import UserError
from tasks.files import fingerprint, hash_files, home, publish, read_json, stage_code, write_json, write_text
from tasks.machines import preemption, usage
from tasks.machines.lock import at_address, note_address
from tasks.models import base_folder, base_hash
from tasks.params import Cluster, Params, load_cluster, load_params
from tasks.paths import METRICS, PAIRS, POLICY, REFERENCE
from tasks.progress import Bar, meanwhile
from tasks.reports import plots
from tasks.tracking.journal import Run, read_lines
from tasks.tracking.tensorboard import Events
from training import batches, checkpoint
from training.guards import Preempted
from training.objective import Objective
from training.packing import Pair
from training.settings import Mismatch, Settings

PREEMPTED = "preempted"  # a file in the training's folder: its workers were asked to end, and have saved a checkpoint
RESERVE, RESERVED = ".reserve", 4096  # a file of so many bytes, for what is to be said when the disk is full
NOT_OF_THE_RESULT = ("tokens_per_second", "pairs_per_second", "mfu", "peak_memory_gib", "checkpoint_seconds")


def train(run: Run) -> None:
    params, cluster = load_params(), load_cluster()
    if params.train.quantization and cluster.actor_train.zero_stage == 3:
        raise UserError(
            "infra/cluster.yaml: actor_train.zero_stage 3 cannot split a base of 4 bits. Set it to 2, or "
            "train.quantization and reference.quantization to null."
        )
    if cluster.actor_train.keep_best and not (params.train.select and params.train.eval_steps):
        raise UserError(
            "infra/cluster.yaml: actor_train.keep_best ranks checkpoints by train.select at every train.eval_steps. "
            "Set both in params.yaml, or keep_best to 0."
        )
    check_inputs()
    asked, runs = params.train.resume_from_checkpoint, run.folder.parent
    start = None if asked in ("auto", "never") else continuation.resolve(asked, runs, signing.checkpoint_key())
    origin = _origin(params, run.folder.name, start)
    trainings = home() / cluster.output_dir / "train"
    folder = trainings / continuation.address(origin)
    if start:
        continuation.check(start, origin)
        run.tags({"resumed_from": str(start), "resumed_from_sha256": origin["start"]})
        if start.parent.parent == trainings.resolve():  # `make gc` keeps it as long as this run
            note_address(start.parent, run.folder, "train")
    (run.folder / continuation.TRAINING).write_text(str(folder))
    with at_address(folder, run.folder, "train"):
        _train(run, params, cluster, folder, origin, start)


def _train(
    run: Run, params: Params, cluster: Cluster, folder: Path, origin: dict[str, Any], start: Path | None
) -> None:
    settings = make_settings(params, cluster, base_folder(params.source.model), folder, origin)
    steps = origin["steps"]
    print(f"train: {steps} steps of {settings.global_batch_size} pairs, {_how(params, cluster)}", flush=True)
    discarded = _discard(folder) if params.train.resume_from_checkpoint == "never" else None
    disk.require("train", disk.training(params, cluster, folder))
    checkpoint.claim(folder, settings.attempt)
    key = signing.checkpoint_key()
    if note := discarded or _begin(folder, origin, start, key):
        print(f"train: {note}", flush=True)
    events = Events(run.folder / "tensorboard" if cluster.tensorboard else None)
    with Bar("train", steps, "steps") as bar, _watched(folder / "metrics.jsonl", run, bar, events):
        _fit(settings, cluster, folder, bar, key)
    shutil.rmtree(folder / checkpoint.START, ignore_errors=True)
    _publish(run, folder)


def _origin(params: Params, run: str, start: Path | None) -> dict[str, Any]:
    """What determines this training: another cluster continues from the same checkpoints."""
    train = params.train
    return {
        "run": run,
        "train": train.model_dump(),
        "steps": batches.total_steps(count_pairs("train"), train.global_batch_size, train.epochs, train.max_steps),
        "base": base_hash(),
        "pairs": fingerprint(hash_files(PAIRS)),
        "reference": fingerprint(read_json(REFERENCE / "manifest.json")),
        "code": stage_code("train", "training/"),
        "start": continuation.content_hash(start) if start else None,
    }


def _discard(folder: Path) -> str:
    """Delete this training's own checkpoints, and say which they were."""
    names = ", ".join(path.name for path in sorted(folder.glob("step-*")))
    shutil.rmtree(folder, ignore_errors=True)
    return f"starting from step 0; deleted this training's {names}" if names else "starting from step 0"


def _begin(folder: Path, origin: dict[str, Any], start: Path | None, key: bytes) -> str | None:
    """Put the checkpoint to start from in place, and say which it is."""
    if last := next(checkpoint.whole_checkpoints(folder, key), None):
        return continuation.resumed(last, origin)
    if start:
        checkpoint.adopt(start, folder)
        return continuation.continued(start, origin)
    return continuation.other_training(folder.parent, origin)


def make_settings(params: Params, cluster: Cluster, model: Path, folder: Path, origin: dict[str, Any]) -> Settings:
    """Field by field, so that a renamed parameter fails here and never falls back to another value."""
    train, group = params.train, cluster.actor_train
    return Settings(
        model=str(model.resolve()),
        model_name=params.source.model if params.source.model.startswith("hub:") else Path(params.source.model).name,
        folder=str(folder),
        attempt=uuid.uuid4().hex[:8],
        objective=Objective(train.loss, train.loss_options()),
        reference_update=train.reference_update.model_dump() if train.reference_update else None,
        router_aux_loss_coef=train.router_aux_loss_coef,
        adapter=train.adapter.model_dump() if train.adapter else None,
        quantization=train.quantization,
        dtype=train.dtype,
        learning_rate=train.learning_rate,
        schedule=train.schedule,
        warmup_fraction=train.warmup_fraction,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        global_batch_size=train.global_batch_size,
        epochs=train.epochs,
        max_steps=train.max_steps,
        logging_steps=train.logging_steps,
        eval_steps=train.eval_steps,
        select=train.select,
        patience=train.patience,
        max_skipped_steps=train.max_skipped_steps,
        kl_limit=train.kl_limit,
        stop_on_alarm=train.stop_on_alarm,
        seed=train.seed,
        deterministic=train.deterministic,
        zero_stage=group.zero_stage,
        offload=group.offload,
        row_tokens=group.row_tokens,
        activation_checkpointing=group.activation_checkpointing,
        compile=group.compile,
        save_steps=group.save_steps,
        keep_checkpoints=group.keep_checkpoints,
        keep_best=group.keep_best,
        origin=origin,
    )


def _how(params: Params, cluster: Cluster) -> str:
    group, adapter = cluster.actor_train, params.train.adapter
    mode = f"LoRA of rank {adapter.rank}" if adapter else "full fine-tuning"
    return f"{mode}, {group.num_workers} workers, ZeRO-{group.zero_stage}, {params.train.dtype}"


def _fit(settings: Settings, cluster: Cluster, folder: Path, bar: Bar, key: bytes) -> None:
    """Start the worker group and wait; a dead worker or a lost node restarts the group from the last checkpoint."""
    from tasks.machines.cluster import (
        bundle,
        look_again,
        nodes_told,
        on_nodes,
        ray_cluster,
        room_for,
        warn_of_slow_dtype,
    )

    group = cluster.actor_train
    warn_of_slow_dtype("train", settings.dtype, group.gpus_per_worker)
    (folder / "refused").unlink(missing_ok=True)
    (folder / RESERVE).write_bytes(b" " * RESERVED)
    # One CPU more than the workers need: Ray Train's controller takes one.
    with ray_cluster(cluster.ray, group.num_workers * group.cpus_per_worker + 1) as private:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from tasks.machines.rendezvous import Rendezvous

        def work(config: dict[str, Any]) -> None:
            _worker(config, key)  # not in the configuration, which Ray shows on its pages

        for start in itertools.count():  # once more after each preemption, which is no failure
            (folder / PREEMPTED).unlink(missing_ok=True)
            # The room is given back at once: Ray Train places the group itself, and would not say that it waits.
            with room_for(cluster.ray, group, group.num_workers):
                model, root = on_nodes(cluster, Path(settings.model)), on_nodes(cluster, Path.cwd(), (PAIRS, REFERENCE))
            trainer = TorchTrainer(
                work,
                train_loop_config={
                    "settings": replace(settings, model=str(model)),
                    "root": str(root),
                    "world": group.num_workers,
                    "driver": (socket.gethostname(), os.getpid()),
                    "system_metrics": cluster.system_metrics,
                },
                torch_config=Rendezvous(folder=str(private) if private else None),
                scaling_config=ScalingConfig(
                    num_workers=group.num_workers,
                    use_gpu=group.gpus_per_worker > 0,
                    resources_per_worker=bundle(group),
                    placement_strategy=group.placement,
                ),
                run_config=RunConfig(
                    name=f"{settings.attempt}-{start}",
                    storage_path=str(folder / "ray"),
                    failure_config=FailureConfig(max_failures=group.max_failures),
                ),
            )
            try:
                with nodes_told(cluster.ray, bar):
                    trainer.fit()
            except Exception as error:
                if (folder / "refused").exists():
                    raise UserError((folder / "refused").read_text().strip()) from error
                raise
            look_again(folder)
            if not (folder / PREEMPTED).exists():
                break
    shutil.rmtree(folder / "ray", ignore_errors=True)
    (folder / RESERVE).unlink(missing_ok=True)
    if (folder / "refused").exists():
        raise UserError((folder / "refused").read_text().strip())


def _worker(config: dict[str, Any], key: bytes) -> None:
    """In each worker: read the artefacts, train, and leave metrics in a file that the driver watches."""
    from training import loop, memory

    settings, root = config["settings"], Path(config["root"])
    threading.Thread(target=_die_with_driver, args=(*config["driver"], settings), daemon=True).start()
    _sample_usage(Path(settings.folder), config["system_metrics"])
    journal, refusal = Path(settings.folder) / "metrics.jsonl", Path(settings.folder) / "refused"
    if refusal.exists():  # by the attempt before this one: a restart cannot mend it
        return

    def write(line: dict[str, Any]) -> None:
        with journal.open("a") as file:
            file.write(json.dumps(line) + "\n")

    try:
        if _begun_before(settings):
            write({"kind": "note", "text": "the workers start again, from the last checkpoint"})
        with preemption.training() as asked:
            loop.train(
                settings,
                _read(settings, "train", root),
                _by_source(settings, root),
                log=lambda step, values: write({"kind": "metrics", "step": step, "values": values}),
                say=lambda sentence: write({"kind": "note", "text": sentence}),
                asked_to_end=asked.is_set,
                key=key,
            )
    except Preempted:
        (Path(settings.folder) / PREEMPTED).touch()
    except memory.OutOfMemory:
        _refuse(settings, f"{memory.out_of_memory(settings, config['world'])}.")
        raise  # the other ranks wait for this one: the group must end
    except Mismatch as error:
        _refuse(settings, f"{error}. Run `dvc repro -f reference`, and then this again.")
    except FloatingPointError as error:
        _refuse(settings, f"{error}. Lower train.learning_rate, and look at the curves in MLflow (`make up`).")
    except ValueError as error:
        _refuse(settings, f"{error}.")
    except Exception as error:
        if sentence := disk.explain(error, Path(settings.folder)):
            _refuse(settings, sentence)
        raise


def _sample_usage(folder: Path, seconds: float | None) -> None:
    """By one worker of each node."""
    from ray.train import get_context

    if seconds and get_context().get_local_rank() == 0:
        given = (folder, get_context().get_node_rank(), seconds)
        threading.Thread(target=usage.sample, args=given, daemon=True).start()


def _read(settings: Settings, split: str, root: Path) -> list[Pair]:
    pairs = read_pairs(split, root)
    return with_reference(pairs, split, root) if settings.objective.needs_reference else pairs


def _by_source(settings: Settings, root: Path) -> dict[str, list[Pair]]:
    """The held-out pairs as one set for each source."""
    sets: dict[str, list[Pair]] = {}
    for pair, source in zip(_read(settings, "eval", root), read_sources("eval", root), strict=True):
        sets.setdefault(source, []).append(pair)
    return sets


def _begun_before(settings: Settings) -> bool:
    """Whether this attempt lost a worker or a node. Asked on rank 0, which says so."""
    from ray.train import get_context

    mark = Path(settings.folder) / "begun"
    if get_context().get_world_rank() != 0:
        return False
    before = mark.exists() and mark.read_text() == settings.attempt
    mark.write_text(settings.attempt)
    return before


def _die_with_driver(host: str, pid: int, settings: Settings) -> None:
    """A busy worker outlives a killed driver for up to a minute, and would go on training for nobody.

    On the driver's host its process tells; on another, that the next attempt has claimed the folder.
    """
    if socket.gethostname() == host:
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.5)
    else:
        while not checkpoint.taken_over(Path(settings.folder), settings.attempt):
            time.sleep(5)
    os._exit(1)


def _refuse(settings: Settings, sentence: str) -> None:
    """What a restart cannot mend is told to the driver, and ends the group in order."""
    folder = Path(settings.folder)
    try:
        write_text(folder / "refused", sentence)
    except OSError:  # a full disk: these bytes were written before it was
        with (folder / RESERVE).open("r+b") as file:
            file.write(sentence.encode()[:RESERVED].ljust(RESERVED))
        (folder / RESERVE).replace(folder / "refused")


@contextmanager
def _watched(journal: Path, run: Run, bar: Bar, events: Events) -> Iterator[None]:
    """Forward what rank 0 logs, while it trains."""
    with closing(events), meanwhile(partial(_watch, journal, run, bar, events)):
        yield


def _watch(journal: Path, run: Run, bar: Bar, events: Events, over: threading.Event) -> None:
    offset, last, step, readings = 0, False, 0, usage.Readings(journal.parent)
    while not last:
        last = over.wait(0.5)
        lines, offset = read_lines(journal, offset)
        for line in lines:
            if line["kind"] == "note":
                bar.say(f"train: {line['text']}")
                continue
            step = line["step"]
            run.metrics(step, line["values"])
            events.add(line["step"], line["values"])
            if "loss" in line["values"]:
                values = line["values"]
                note = f"loss {values['loss']:.3f}, reward accuracy {values['rewards/accuracies']:.2f}"
                bar.update(line["step"], note)
        run.metrics(step, readings.new())


def _publish(run: Run, folder: Path) -> None:
    """The policy, its curves and its final figures, as outs."""
    steps = _by_step(folder / "metrics.jsonl")
    with publish(POLICY) as out:
        shutil.copytree(folder / "policy", out, dirs_exist_ok=True)
    METRICS.mkdir(parents=True, exist_ok=True)
    write_curves(METRICS / "train.csv", steps)
    final = {name: value for row in steps.values() for name, value in row.items() if name not in ("pairs", "tokens")}
    write_json(METRICS / "train.json", final)
    plots.curves(steps, run.folder / "curves.png")
    run.artifact(run.folder / "curves.png")
    run.summary({name: value for name, value in final.items() if not name.startswith("eval/")})


def _by_step(journal: Path) -> dict[int, dict[str, float]]:
    """Values by step; a step that was repeated after a restart counts once, and speeds are not part of a result."""
    steps: dict[int, dict[str, float]] = {}
    for line in (line for line in read_lines(journal)[0] if line["kind"] == "metrics"):
        kept = {name: value for name, value in line["values"].items() if name not in NOT_OF_THE_RESULT}
        if kept:
            steps.setdefault(line["step"], {}).update(kept)
    return dict(sorted(steps.items()))


def write_curves(path: Path, steps: dict[int, dict[str, float]]) -> None:
    columns = sorted({name for row in steps.values() for name in row})
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *columns])
        writer.writerows([step, *(row.get(name, "") for name in columns)] for step, row in steps.items())


if __name__ == "__main__":
    stage.main(train)
