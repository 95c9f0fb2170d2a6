"""Checks whether the configured run fits this machine: disk space, shared memory, memory of each device."""

import shutil
from pathlib import Path
from typing import Any

import psutil

from tasks.artifacts import adapters
from tasks.config.cluster import Cluster
from tasks.config.params import Params
from tasks.config.paths import main_checkout
from tasks.disk_space import run_needs
from tasks.doctor.report import Report
from tasks.lifecycle.estimates import model_on_machine, weights_memory

GIB = 2**30
MINIMUM_DISK = 10 * GIB  # while the model is unknown
MINIMUM_SHARED = GIB // 2
ADVICE = (
    "`dvc gc --workspace` deletes cached data that no workspace uses, a smaller actor_train.keep_checkpoints keeps "
    "fewer checkpoints, output_dir moves them"
)


def disk(report: Report, params: Params, cluster: Cluster, sizes: Any | None) -> None:
    """`sizes` of the model from training.trainer.memory; None while the model is not on this machine."""
    free = shutil.disk_usage(main_checkout()).free
    if sizes is None:
        sentence = f"{free / GIB:.0f} GiB of disk are free; how much the run needs is unknown until the model is here"
        report.check(free >= MINIMUM_DISK, sentence, f"{sentence}. Free some space: {ADVICE}.")
        return
    parts = run_needs(params, cluster, sizes)
    total = sum(parts.values())
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size > 0.05 * GIB)
    files = f" ({listed})" if listed else ""
    sentence = f"this run writes up to {total / GIB:.1f} GiB{files}, and {free / GIB:.1f} GiB of disk are free"
    report.check(total <= free, sentence, f"{sentence}. Free some space: {ADVICE}.")


def shared_memory(report: Report, folder: Path = Path("/dev/shm")) -> None:
    """/dev/shm holds Ray's objects and messages between workers of a machine; a container gets 64 MiB by default."""
    if not folder.exists():
        return
    size = shutil.disk_usage(folder)
    sentence = f"{folder} has {size.total / GIB:.2g} GiB, {size.free / GIB:.2g} of them free"
    remedy = f"Start the container with `--shm-size=8g`, or run `mount -o remount,size=8G {folder}`"
    report.check(size.free >= MINIMUM_SHARED, sentence, f"{sentence}, and workers need half a GiB. {remedy}.")


def fit(report: Report, params: Params, cluster: Cluster) -> None:
    """Compare disk space and device memory with what this run needs, as far as the model is known."""
    folder = model_on_machine(params.source.model, Path())
    if folder is None:
        disk(report, params, cluster, None)
        report.note(
            f"{params.source.model} is not on this machine yet: run `dvc repro source`, then `dpo doctor` again"
        )
        return
    from training.trainer.memory import model_sizes

    adapter = params.train.adapter.model_dump() if params.train.adapter else None
    with adapters.errors_of("train"):
        sizes = model_sizes(folder, adapter, params.train.quantization)
    disk(report, params, cluster, sizes)
    _memory(report, params, cluster, folder)


def _memory(report: Report, params: Params, cluster: Cluster, folder: Path) -> None:
    from tasks.train.driver import make_settings  # loads torch, which takes seconds
    from training.trainer import memory

    settings = make_settings(params, cluster, folder, main_checkout() / cluster.output_dir, origin={})
    needed = memory.estimate(settings, cluster.actor_train.num_workers)
    _check_memory(report, cluster, "actor_train", f"train needs about {needed}", needed.total, memory.advice(settings))
    for name in ("reference", "inference"):
        weights = weights_memory(params, cluster, folder, name)
        sentence = f"{name} needs {weights / GIB:.1f} GiB for the weights, plus activations,"
        advice = (
            f"set the dtype of reference, train and evaluate to bfloat16, or {name}.zero_stage in infra/cluster.yaml "
            "to 3 with several workers"
        )
        _check_memory(report, cluster, name, sentence, weights, advice)


def _check_memory(report: Report, cluster: Cluster, name: str, sentence: str, needed: float, advice: str) -> None:
    """Whether a worker of the group has the memory that it needs."""
    from training.evaluation.hardware import gpus  # loads torch

    group, cards = getattr(cluster, name), gpus()
    sentence = f"{sentence} on each of {group.num_workers} workers"
    if not group.gpus_per_worker:
        fits = needed * group.num_workers <= psutil.virtual_memory().total
        report.check(fits, sentence, f"{sentence}, more than this machine's memory: {advice}.")
    elif cards:
        size = cards[0][1]
        report.check(needed <= size, sentence, f"{sentence}, and a GPU has {size / GIB:.0f} GiB: {advice}.")
    elif cluster.ray.address == "local":
        problem = f"{sentence}, {name}.gpus_per_worker asks for GPUs, and this machine has none"
        report.wrong(f"{problem}. Set it to 0, or ray.address to a cluster.")
    else:
        report.note(f"{sentence}; this machine has no GPU to compare with")
