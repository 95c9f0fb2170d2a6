"""Metrics as TensorBoard event files, where infra/cluster.yaml asks for them."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Events:
    """Writes a run's metrics into a folder; does nothing without one.

    A stage that goes on shows its first steps again: the folder starts empty.
    """

    def __init__(self, folder: Path | None) -> None:
        self.writer: Any = None
        if folder:
            from tensorboardX import SummaryWriter

            shutil.rmtree(folder, ignore_errors=True)
            self.writer = SummaryWriter(str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items() if self.writer else ():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer:
            try:
                self.writer.close()
            except OSError:  # a full disk, which the stage tells: the writer must not try again when Python ends
                self.writer.file_writer.event_writer._closed = True
                raise
