"""A worker of the group `actor_train`: reads pairs and reference, runs the training loop, reports through files.

The files lie in the training's folder, which all ranks and the driver (tasks/train/driver.py) share.
"""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from tasks.artifacts.training_data import TrainingData
from tasks.cluster import preemption, system_metrics
from tasks.system import disk, processes
from tasks.system.files import write_text
from tasks.tracking.journal import Journal
from training.trainer import checkpoint_files
from training.trainer.settings import Preempted, ReferenceMismatch, Settings

JOURNAL = "metrics.jsonl"  # metrics and messages of rank 0
PREEMPTED = "preempted"  # exists when the workers were preempted and have saved a checkpoint
FATAL = "fatal.txt"  # the message of an error that a restart cannot fix
RESERVE, RESERVE_BYTES = ".reserve", 4096  # disk space for that message when the disk is full
PREFERENCE_METRICS = re.compile(r"(^|/)(rewards/|logps/|sft_loss$)")  # without meaning for a single answer


def train_on_worker(config: dict[str, Any], key: bytes) -> None:
    """Train as one rank; Ray Train calls this again after a failure. `key` authenticates checkpoints."""
    # torch, transformers and DeepSpeed, which the driver never needs.
    from ray.train import get_context

    from training.models.compiling import start_compiler

    settings, root, context = config["settings"], Path(config["root"]), get_context()
    if settings.compile:
        start_compiler()

    from training.distributed.process_group import has_process_group
    from training.trainer import loop, memory

    folder, data, needs_reference = Path(settings.folder), config["data"], settings.objective.needs_reference
    journal = Journal(folder / JOURNAL)
    _in_thread(_exit_without_driver, config["driver"], settings)
    if config["system_metrics"] and context.get_local_rank() == 0:
        _in_thread(system_metrics.sample, journal.path, context.get_node_rank(), config["system_metrics"])
    if (folder / FATAL).exists():  # from the previous attempt
        return

    try:
        if context.get_world_rank() == 0 and _is_restart(settings):
            journal.write("note", text="restarting the workers from the last checkpoint")
        with preemption.preemptible() as preempted:
            loop.train(
                settings,
                data.read("train", root, needs_reference),
                data.read("eval", root, needs_reference).by_source(),
                log=lambda step, values: journal.metrics(step, _meaningful(values, data)),
                notify=lambda message: journal.write("note", text=message),
                stop_requested=preempted.is_set,
                key=key,
            )
    except Preempted:
        (folder / PREEMPTED).touch()
    except memory.OutOfMemory:
        _write_fatal(folder, f"{memory.out_of_memory(settings, config['world'])}.")
        raise  # the other ranks wait for this one, so the group must end
    except ReferenceMismatch as error:
        _write_fatal(folder, f"{error}. Run `dvc repro -f reference`, and then repeat the command.")
    except FloatingPointError as error:
        _write_fatal(folder, f"{error}. Lower train.learning_rate, and look at the curves in MLflow (`dpo up`).")
    except ValueError as error:
        if not has_process_group():  # Ray ended it while we computed, because another worker died
            raise
        _write_fatal(folder, f"{error}.")
    except Exception as error:
        if message := disk.explain(error, folder):
            _write_fatal(folder, message)
        raise


def _meaningful(values: dict[str, float], data: TrainingData) -> dict[str, float]:
    if data.preferences:
        return values
    return {name: value for name, value in values.items() if not PREFERENCE_METRICS.search(name)}


def _in_thread(function: Any, *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _exit_without_driver(driver: dict[str, Any], settings: Settings) -> None:
    """End this process when the driver is gone: Ray would let a busy worker train for up to a minute more.

    On another host than the driver's, only the claim of the next attempt on the folder tells that it is gone.
    """
    while processes.is_alive(driver) and not checkpoint_files.taken_over(Path(settings.folder), settings.attempt):
        time.sleep(1)
    os._exit(1)


def _is_restart(settings: Settings) -> bool:
    """Whether this attempt started its workers before, and has lost a worker or a node since."""
    marker = Path(settings.folder) / "begun"
    is_restart = marker.exists() and marker.read_text() == settings.attempt
    marker.write_text(settings.attempt)
    return is_restart


def _write_fatal(folder: Path, message: str) -> None:
    """Tell the driver about an error that a restart cannot fix."""
    try:
        write_text(folder / FATAL, message)
    except OSError:  # a full disk: reuse the reserved bytes
        with (folder / RESERVE).open("r+b") as file:
            file.write(message.encode()[:RESERVE_BYTES].ljust(RESERVE_BYTES))
        (folder / RESERVE).replace(folder / FATAL)
