"""How fast a run is: tokens and pairs a second, the share of the device's matrix peak, and its memory."""

import time
from collections.abc import Mapping

import torch
from torch import nn


class Speed:
    """Rates since the last call, pauses (evaluation, checkpoints) left out."""

    def __init__(self, model: nn.Module, device: torch.device, world: int) -> None:
        self.on_gpu, self.world = device.type == "cuda", world
        # Of a token: 2 operations a weight forward, 2 backward to the input, and 2 to the weight where it learns.
        sizes = [(p.numel() or getattr(p, "ds_numel", 0), p.requires_grad) for p in model.parameters()]
        self.operations = sum(size * (6 if learns else 4) for size, learns in sizes)
        self.peak = matrix_peak(device) if self.on_gpu else None
        self.begun = time.monotonic()

    def pause(self) -> None:
        self.begun = time.monotonic()

    def since(self, values: Mapping[str, float]) -> dict[str, float]:
        seconds = max(time.monotonic() - self.begun, 1e-9)
        self.begun = time.monotonic()
        rates = {"tokens_per_second": values["tokens"] / seconds, "pairs_per_second": values["pairs"] / seconds}
        if self.peak:
            rates["mfu"] = self.operations * rates["tokens_per_second"] / self.world / self.peak
            rates["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return rates


def matrix_peak(device: torch.device, size: int = 8192) -> float:
    """Operations a second of a large bfloat16 product on this device, measured."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(10):
        a @ a
    torch.cuda.synchronize(device)
    return 10 * 2 * size**3 / (time.perf_counter() - begun)
