"""How fast a run is: tokens and pairs a second, the share of the device's matrix peak, and its memory."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class Speed:
    """Rates since the last call, pauses (evaluation, checkpoints) left out.

    `before` holds the tokens and pairs that a resumed run's window already has: an earlier process computed them.
    """

    def __init__(self, model: nn.Module, device: torch.device, world: int, before: Mapping[str, float]) -> None:
        self.on_gpu, self.world, self.before = device.type == "cuda", world, before
        # Of a token: 2 operations a weight forward, 2 backward to the input, and 2 to the weight where it learns.
        self.operations = sum(_size(p) * (6 if p.requires_grad else 4) for p in model.parameters())
        self.peak = matrix_peak(device) if self.on_gpu else None
        self.begun = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        pause = time.monotonic()
        yield
        self.begun += time.monotonic() - pause

    def since(self, values: Mapping[str, float]) -> dict[str, float]:
        now = time.monotonic()
        seconds, self.begun = max(now - self.begun, 1e-9), now
        tokens, pairs = (values[name] - self.before.get(name, 0.0) for name in ("tokens", "pairs"))
        self.before = {}
        rates = {"tokens_per_second": tokens / seconds, "pairs_per_second": pairs / seconds}
        if self.peak:
            rates["mfu"] = self.operations * rates["tokens_per_second"] / self.world / self.peak
        if self.on_gpu:
            rates["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return rates


def _size(parameter: nn.Parameter) -> int:
    """Weights, wherever they are: ZeRO-3 leaves an empty tensor, and 4 bits put two of them into a byte."""
    if (packed := getattr(parameter, "quant_state", None)) is not None:
        return packed.shape.numel()
    return parameter.numel() or getattr(parameter, "ds_numel", 0)


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
