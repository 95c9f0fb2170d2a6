"""Metrics as TensorBoard event files, where infra/cluster.yaml asks for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Events:
    """Writes into a folder; does nothing without one."""

    def __init__(self, folder: Path | None) -> None:
        self.writer: Any = None
        if folder:
            from tensorboardX import SummaryWriter

            self.writer = SummaryWriter(str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer:
            self.writer.close()
