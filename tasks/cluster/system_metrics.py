"""CPU, memory and GPU usage of a training node by step, under the names of MLflow's own system metrics.

MLflow's monitor sends to its server from each node. Our workers reach no server, so one worker of each node writes a
journal beside that of rank 0.
"""

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.tracking.journal import Journal
from tasks.tracking.journal_reader import last_step

GPU_FIELDS = "index,utilization.gpu,memory.used,memory.total"
NVIDIA_SMI = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]


def node_usage() -> dict[str, float]:
    """Usage of this node now, in percent; CPU usage since the last call."""
    return {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_percentage": psutil.virtual_memory().percent,
        **_gpu_usage(),
    }


def _gpu_usage() -> dict[str, float]:
    """Of every GPU, from NVIDIA's driver; a value that the driver does not know is left out."""
    try:
        table = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    usage: dict[str, float] = {}
    for row in table.splitlines():
        index, utilization, used, total = row.split(", ")
        with suppress(ValueError):
            usage[f"gpu_{index}_utilization_percentage"] = float(utilization)
        with suppress(ValueError):
            usage[f"gpu_{index}_memory_usage_percentage"] = round(100 * float(used) / float(total), 1)
    return usage


def sample(training: Path, node: int, seconds: float) -> None:
    """Write the usage at this interval, at the last step in the training's journal, as long as the worker lives."""
    journal = Journal(training.with_name(f"usage-{node}.jsonl"))
    psutil.cpu_percent()  # measure from here on
    with suppress(OSError):  # the training itself reports a full disk
        while True:
            time.sleep(seconds)
            usage = {f"system/node{node}/{name}": value for name, value in node_usage().items()}
            journal.metrics(last_step(training), usage)
