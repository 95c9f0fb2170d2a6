"""Throughput of a run: tokens and pairs per second, model FLOPs utilization (MFU), and peak memory."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class Speed:
    """Rates since the last call, without pauses (evaluation, checkpoints).

    `before` holds the tokens and pairs in a resumed run's window, which an earlier process computed.
    """

    def __init__(self, model: nn.Module, device: torch.device, world: int, before: Mapping[str, float]) -> None:
        self.on_gpu, self.world, self.before = device.type == "cuda", world, before
        # FLOPs per token: 2 per weight forward, 2 backward to the input, and 2 to the weight if it is trainable.
        self.flops_per_token = sum(_size(p) * (6 if p.requires_grad else 4) for p in model.parameters())
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
            rates["mfu"] = self.flops_per_token * rates["tokens_per_second"] / self.world / self.peak
        if self.on_gpu:
            rates["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return rates


def _size(parameter: nn.Parameter) -> int:
    """Number of weights: under ZeRO-3 the tensor is empty, and with 4 bits a byte holds two of them."""
    if (packed := getattr(parameter, "quant_state", None)) is not None:
        return packed.shape.numel()
    return parameter.numel() or getattr(parameter, "ds_numel", 0)


def matrix_peak(device: torch.device, size: int = 8192) -> float:
    """Measured FLOP/s of a large bfloat16 matrix product on this device."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(10):
        a @ a
    torch.cuda.synchronize(device)
    return 10 * 2 * size**3 / (time.perf_counter() - begun)
