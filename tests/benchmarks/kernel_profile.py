"""Where a step's time on the GPU goes: milliseconds by kind of kernel, and the time without any kernel."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

# The first pattern that a kernel's name matches.
KINDS = {
    "matrix products": r"nvjet|gemm|cutlass_3x|cublas|scaled_mm",
    "attention": r"flash|fmha|cudnn_generated|sdpa|chunk_|delta_rule",
    "head: statistics and gradients of logits": r"_stats_kernel|_grads_kernel",
    "fused layers": r"^triton_",
    "update": r"multi_tensor_apply|adam|lerp|_step_kernel",
    "copies": r"^Mem(cpy|set)",
    "collectives": r"nccl",
}
MAX_NAMES = 3  # kernels to name of each kind


def start() -> Any:
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profile.start()
    return profile


def stop(profile: Any, steps: int) -> dict[str, Any]:
    """Milliseconds per step: {"profile": {kind: ms}, "kernels": {kind: the longest}}."""
    torch.cuda.synchronize()
    profile.stop()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    totals: Counter[str] = Counter()
    names: dict[str, Counter[str]] = {}
    for event in kernels:
        kind = kind_of(event.name)
        milliseconds = event.time_range.elapsed_us() / 1000 / steps
        totals[kind] += milliseconds
        names.setdefault(kind, Counter())[event.name[:60]] += milliseconds
    wall = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1000 / steps
    totals["no kernel"] = wall - covered(spans) / 1000 / steps
    longest = {
        kind: [f"{name} {ms:.1f}" for name, ms in counter.most_common(MAX_NAMES)] for kind, counter in names.items()
    }
    return {"profile": {"step": wall, **dict(totals.most_common())}, "kernels": longest}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union: kernels on two streams overlap."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
