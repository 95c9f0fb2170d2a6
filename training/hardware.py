"""The machine that a model was made on."""

import os
import platform

import torch


def hardware() -> dict[str, str | int]:
    found: dict[str, str | int] = {"machine": platform.machine(), "cpus": os.cpu_count() or 0}
    if torch.cuda.is_available():
        found |= {"gpus": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name(0)}
    return found
