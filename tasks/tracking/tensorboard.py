"""Metrics as TensorBoard event files, where infra/cluster.yaml asks for them."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Events:
    """Writes a run's metrics into a folder; does nothing without one.

    A stage that goes on reports its first steps again, and a restarted group its last ones: the folder starts empty,
    and a step is written once.
    """

    def __init__(self, folder: Path | None) -> None:
        self.writer: Any = None
        self.written: dict[str, int] = {}  # the last step by name
        if folder:
            from tensorboardX import SummaryWriter

            shutil.rmtree(folder, ignore_errors=True)
            self.writer = SummaryWriter(str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        new = {name: value for name, value in values.items() if step > self.written.get(name, -1)}
        self.written.update(dict.fromkeys(new, step))
        if self.writer:
            for name, value in new.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer:
            try:
                self.writer.close()
            except OSError:  # a full disk, which the stage tells: the writer must not try again when Python ends
                self.writer.file_writer.event_writer._closed = True
                raise
