"""The CPUs and GPUs of this machine."""

import gc
import os
import platform
import time
from collections.abc import Callable

import torch

from training.models.dtypes import DTYPES

MEASURED_SECONDS = 0.5


def gpus() -> list[tuple[str, int]]:
    """Name and bytes of each GPU."""
    numbers = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [(torch.cuda.get_device_name(n), torch.cuda.get_device_properties(n).total_memory) for n in numbers]


def free_gpu_memory() -> int:
    """Free unreferenced GPU memory; the bytes that this process still holds."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def hardware() -> dict[str, str | int]:
    summary: dict[str, str | int] = {"machine": platform.machine(), "cpus": os.cpu_count() or 0}
    if available := gpus():
        summary |= {"gpus": len(available), "gpu": available[0][0]}
    return summary


def operations_per_second(dtype: str, cpus: int) -> float:
    """Of a matrix product on one GPU, or on `cpus` idle cores."""
    if torch.cuda.is_available():
        return _measure(4096, dtype, "cuda", time.monotonic)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return cpus * _measure(1024, dtype, "cpu", time.thread_time)
    finally:
        torch.set_num_threads(threads)


def _measure(size: int, dtype: str, device: str, clock: Callable[[], float]) -> float:
    left, right = (torch.randn(size, size, dtype=DTYPES[dtype], device=device) for _ in range(2))
    left @ right  # the first product is slower
    begun, count, spent = clock(), 0, 0.0
    while spent < MEASURED_SECONDS:
        left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        count, spent = count + 1, clock() - begun
    return 2.0 * size**3 * count / spent
