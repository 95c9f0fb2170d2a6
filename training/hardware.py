"""The machine that a model was made on."""

import gc
import os
import platform

import torch


def gpus() -> list[tuple[str, int]]:
    """Name and bytes of each GPU here."""
    every = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [(torch.cuda.get_device_name(n), torch.cuda.get_device_properties(n).total_memory) for n in every]


def give_back_memory() -> int:
    """Of what nothing refers to any more; the bytes that this process still holds of its GPU."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def hardware() -> dict[str, str | int]:
    found: dict[str, str | int] = {"machine": platform.machine(), "cpus": os.cpu_count() or 0}
    if torch.cuda.is_available():
        found |= {"gpus": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name(0)}
    return found
