"""Check that torch's CUDA build works with the NVIDIA driver of this machine."""

import subprocess
from dataclasses import dataclass

import torch

MIN_DRIVER = {"11": 450, "12": 525, "13": 580}  # by CUDA major version, on Linux
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Stack:
    torch: str
    cuda: str | None  # version that torch was built for; None: a CPU build
    driver: str | None  # None: no NVIDIA driver
    usable: bool  # torch sees a GPU


def stack() -> Stack:
    return Stack(torch.__version__, torch.version.cuda, _driver(), torch.cuda.is_available())


def mismatch(installed: Stack) -> str | None:
    """What is wrong and how to fix it; None if torch and driver match, or if there is no NVIDIA driver."""
    if installed.driver is None:
        return None
    if installed.cuda is None:
        return (
            f"torch {installed.torch} is a CPU build, but this machine has an NVIDIA driver ({installed.driver}). "
            "Install the build of the same version for your CUDA"
        )
    minimum, major = MIN_DRIVER.get(installed.cuda.split(".")[0]), installed.driver.split(".")[0]
    if minimum and major.isdecimal() and int(major) < minimum:
        return (
            f"torch {installed.torch} is built for CUDA {installed.cuda}, which needs driver {minimum} or newer; "
            f"this machine has {installed.driver}. Update the driver, or install a torch for an older CUDA"
        )
    if not installed.usable:
        return (
            f"this machine has an NVIDIA driver ({installed.driver}), but torch {installed.torch} sees no GPU. Check "
            "CUDA_VISIBLE_DEVICES and, in a container, `--gpus all`"
        )
    return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)
