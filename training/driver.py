"""What torch was built for, against the driver that this machine has."""

import shutil
import subprocess
from dataclasses import dataclass

import torch

LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}  # by CUDA's major version, on Linux
SECONDS = 10.0


@dataclass(frozen=True)
class Stack:
    torch: str
    cuda: str | None  # that torch was built for
    driver: str | None  # None: no NVIDIA driver answers
    usable: bool


def stack() -> Stack:
    return Stack(torch.__version__, torch.version.cuda, _driver(), torch.cuda.is_available())


def mismatch(found: Stack) -> str | None:
    """What is wrong, and what mends it; None where all fits, or where there is no GPU to use."""
    if found.driver is None:
        return None
    if found.cuda is None:
        return (
            f"torch {found.torch} is built for CPUs, and this machine has an NVIDIA driver ({found.driver}). "
            "Install the build of the same version for your CUDA"
        )
    least = LEAST_DRIVER.get(found.cuda.split(".")[0])
    if least and _major(found.driver) < least:
        return (
            f"torch {found.torch} is built for CUDA {found.cuda}, which needs driver {least} or newer, and here is "
            f"{found.driver}. Update the driver, or install a torch for an older CUDA"
        )
    if not found.usable:
        return (
            f"there is an NVIDIA driver ({found.driver}), and torch {found.torch} sees no GPU. Look at "
            "CUDA_VISIBLE_DEVICES, and in a container at `--gpus all`"
        )
    return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (subprocess.TimeoutExpired, OSError):
        return None
    lines = done.stdout.split() if done.returncode == 0 else []
    return lines[0] if lines else None


def _major(version: str) -> int:
    first = version.split(".")[0]
    return int(first) if first.isdecimal() else 0
