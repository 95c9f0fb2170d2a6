"""The blocks that are allocated on the GPU at the memory peak, by size, and the code that allocated them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

OURS = ("/training/", "/peft/", "/transformers/models/", "/deepspeed/", "torchinductor_")
MAX_KINDS = 24  # kinds of blocks to list


def record() -> None:
    # Only stacks of allocations: recording a stack while an exception frees memory loses the exception, and activation
    # checkpointing stops its recomputation by an exception.
    torch.cuda.memory._record_memory_history(context="alloc", max_entries=4_000_000, stacks="python")


def at_peak() -> dict[str, Any]:
    """GiB allocated at the peak since `record`; blocks of the same size and origin together, largest first."""
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    alive = live_at_peak(snapshot["device_traces"][0])
    counts = Counter((block["size"], origin(block["frames"])) for block in alive)
    kinds = sorted(counts.items(), key=lambda item: -item[0][0] * item[1])
    return {
        "expandable_segments": snapshot.get("allocator_settings", {}).get("expandable_segments"),
        "alive_gib": sum(block["size"] for block in alive) / 2**30,
        "alive": [f"{count} x {size / 2**20:.1f} MiB  {where}" for (size, where), count in kinds[:MAX_KINDS]],
    }


def live_at_peak(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    total, largest, peak = 0, 0, 0
    for number, event in enumerate(events):
        total += {"alloc": event["size"], "free_requested": -event["size"]}.get(event["action"], 0)
        if total > largest:
            largest, peak = total, number
    live: dict[int, dict[str, Any]] = {}
    for event in events[: peak + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    return list(live.values())


def origin(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost lines of code outside torch."""
    outside = [frame for frame in frames if any(part in frame["filename"] for part in OURS)]
    return " < ".join(f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']}" for frame in outside[:3]) or "elsewhere"
