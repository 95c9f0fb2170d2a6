"""TR-DPO (arXiv 2404.09656): a reference that follows the policy, ref <- alpha policy + (1 - alpha) ref every N steps.

It is a copy of the trainable parameters (with LoRA: of the adapter), which takes their place for a pass without
gradients. Until the first update the stored reference values hold; held-out metrics always use those.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import engine
from training.logps import row_logps
from training.packing import Row

FILE = "reference.safetensors"


class MovingReference:
    def __init__(self, policy: Any, every: int, alpha: float) -> None:
        """Of a policy that is still the original reference."""
        self.policy, self.every, self.alpha = policy, every, alpha
        self.parameters = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        self.copies = [engine.held(parameter).clone() for parameter in self.parameters.values()]

    def cost(self) -> str:
        size = sum(copy.numel() * copy.element_size() for copy in self.copies) / 2**30
        return (
            f"the reference follows the policy every {self.every} steps (train.reference_update): after step "
            f"{self.every} each row takes one more forward pass, and a copy of the trainable weights takes "
            f"{size:.2g} GiB on each worker"
        )

    def rows(self, step: int, rows: Sequence[tuple[Row, bool]]) -> list[tuple[Row, bool]]:
        """The rows of a step (from 0) with the reference's log-probabilities of now. A collective under ZeRO-3."""
        if step < self.every:
            return list(rows)
        with self._in_place(), torch.no_grad():
            return [(replace(row, reference=row_logps(self.policy, row).logps), counts) for row, counts in rows]

    @torch.no_grad()
    def update(self, done: int) -> None:
        """After `done` steps, in float32 whatever the precision of the weights."""
        if done % self.every:
            return
        for copy, parameter in zip(self.copies, self.parameters.values(), strict=True):
            copy.copy_(torch.lerp(copy.float(), engine.held(parameter).float(), self.alpha))

    def gathered(self) -> dict[str, Tensor]:
        """Whole, on rank 0, for a checkpoint that any number of ranks can load. A collective."""
        with self._in_place():
            return dict(engine.gathered(self.parameters.items()))

    def load(self, checkpoint: Path) -> None:
        """From a checkpoint; one without a copy was made with the original reference. A collective."""
        if (checkpoint / FILE).exists():
            with self._in_place():
                engine.scatter(self.parameters, checkpoint / FILE)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        policy = engine.exchange(self.policy, self.parameters.values(), self.copies)
        try:
            yield
        finally:
            engine.exchange(self.policy, self.parameters.values(), policy)
