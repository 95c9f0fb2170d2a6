"""CPU, memory and GPUs of a training node by step, under the names of MLflow's own system metrics.

MLflow's monitor sends to its server from each node; here workers reach no server, so one worker of each node leaves
figures in a file, and the driver puts them into its journal.
"""

import ctypes
import json
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tasks.tracking.journal import read_lines

FILES = "usage-*.jsonl"


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@cache
def _nvml() -> Any:
    """NVIDIA's management library, which comes with the driver; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def figures() -> dict[str, float]:
    """Of this node now; the CPU's since the last call."""
    found = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_percentage": psutil.virtual_memory().percent,
    }
    count = ctypes.c_uint(0)
    if (nvml := _nvml()) and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        for index in range(count.value):
            found |= {f"gpu_{index}_{name}": value for name, value in _gpu(nvml, index).items()}
    return found


def _gpu(nvml: Any, index: int) -> dict[str, float]:
    device, busy, memory = ctypes.c_void_p(), _Utilization(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        return {}
    found: dict[str, float] = {}
    if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0:
        found["utilization_percentage"] = float(busy.gpu)
    if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0 and memory.total:
        found["memory_usage_percentage"] = round(100 * memory.used / memory.total, 1)
    return found


def sample(folder: Path, node: int, seconds: float) -> None:
    """In a thread of one worker of each node, for as long as the worker lives."""
    psutil.cpu_percent()  # from here on
    with suppress(OSError):  # a full disk is told by those whose data it holds
        while True:
            time.sleep(seconds)
            values = {f"system/node{node}/{name}": value for name, value in figures().items()}
            with (folder / f"usage-{node}.jsonl").open("a") as file:
                file.write(json.dumps(values) + "\n")


class Readings:
    """What the nodes leave in the folder of a training from now on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets = {path: path.stat().st_size for path in folder.glob(FILES)}

    def new(self) -> dict[str, float]:
        """The newest figures of each node since the last call."""
        found: dict[str, float] = {}
        for path in sorted(self.folder.glob(FILES)):
            lines, self.offsets[path] = read_lines(path, self.offsets.get(path, 0))
            found |= lines[-1] if lines else {}
        return found
