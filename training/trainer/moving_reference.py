"""TR-DPO (arXiv 2404.09656): a reference that follows the policy, ref <- alpha policy + (1 - alpha) ref every N steps.

The reference is a copy of the trainable parameters (with LoRA: of the adapter). It replaces them during a pass without
gradients. The stored reference values apply until the first update, and always for held-out metrics.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.pairs.packing import PackedRow
from training.scoring.logps import row_logps
from training.trainer import engine

FILE = "reference.safetensors"


class MovingReference:
    def __init__(self, policy: Any, every: int, alpha: float) -> None:
        """Copy a policy that still equals the original reference."""
        self.policy, self.every, self.alpha = policy, every, alpha
        self.parameters = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        self.copies = [engine.local_shard(parameter).data.clone() for parameter in self.parameters.values()]

    def cost(self) -> str:
        size = sum(copy.numel() * copy.element_size() for copy in self.copies) / 2**30
        return (
            f"the reference follows the policy every {self.every} steps (train.reference_update): after step "
            f"{self.every} each row takes one more forward pass, and a copy of the trainable weights takes "
            f"{size:.2g} GiB on each worker"
        )

    def rows(self, step: int, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """The rows of a step (from 0) with the current reference's log-probabilities. A collective under ZeRO-3."""
        if step < self.every:
            return list(rows)
        with self._in_place(), torch.no_grad():
            return [replace(row, ref_logps=row_logps(self.policy, row).logps) for row in rows]

    @torch.no_grad()
    def update(self, done: int) -> None:
        """Move the reference if it is due after `done` steps; in float32, whatever the precision of the weights."""
        if done % self.every:
            return
        for copy, parameter in zip(self.copies, self.parameters.values(), strict=True):
            copy.copy_(torch.lerp(copy.float(), engine.local_shard(parameter).data.float(), self.alpha))

    def gathered(self) -> dict[str, Tensor]:
        """Whole tensors on rank 0, for a checkpoint that any number of ranks can load. A collective."""
        with self._in_place():
            return dict(engine.gathered(self.parameters.items()))

    def load(self, checkpoint: Path) -> None:
        """Load from a checkpoint; without the file it was made with the original reference. A collective."""
        if (checkpoint / FILE).exists():
            with self._in_place():
                engine.scatter(self.parameters, checkpoint / FILE)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        policy = engine.swap_values(self.policy, self.parameters.values(), self.copies)
        try:
            yield
        finally:
            engine.swap_values(self.policy, self.parameters.values(), policy)
