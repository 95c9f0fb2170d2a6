"""Journals: JSON lines on disk, in which each value is written once, by the process that knows it.

A stage writes one in the run's folder, and rank 0 of a training one in the training's folder, which the stage's journal
includes. Everything that shows or sends a value reads them (journal_reader.py), so a tracking server that is slow or
down never delays a stage.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tasks.secrets.redact import redacted

FLOW = "flow"  # the journal of the pipeline run itself


class Journal:
    """JSON lines that other processes read while the file grows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, kind: str, **content: Any) -> None:
        line = {"kind": kind, "time": int(time.time() * 1000), **redacted(content)}
        with self.path.open("ab+") as file:  # closed after each line: on a shared disk, other hosts see it then
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            begin = b"" if file.read() in (b"", b"\n") else b"\n"  # a killed process wrote half a line
            file.write(begin + json.dumps(line, default=str).encode() + b"\n")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a step; what repeats a step after a restart does not count (journal_reader.py)."""
        self.write("metrics", step=step, values=dict(values))


class StageJournal(Journal):
    """The journal of a stage in the run's folder: from its start to its end, every attempt."""

    def __init__(self, folder: Path, stage: str) -> None:
        super().__init__(folder / f"{stage}.jsonl")
        self.folder, self.stage = folder, stage

    @contextmanager
    def including(self, folder: Path) -> Iterator[None]:
        """The journals in `folder`, which other processes write meanwhile, are part of this one from their beginning.

        A training outlives its stage and may serve several runs; what those add later is not part of this journal.
        """
        self.write("include", folder=os.path.relpath(folder, self.folder))
        try:
            yield
        except BaseException:
            with suppress(OSError):  # a full disk: the error of the block says more
                self.end_include(folder)
            raise
        self.end_include(folder)

    def end_include(self, folder: Path) -> None:
        """Hard links keep what was included, if the training's folder is deleted before MLflow has it."""
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.jsonl")}
        kept = self.folder / "included" / folder.name
        with suppress(OSError):  # another file system, or a full one
            kept.mkdir(parents=True, exist_ok=True)
            for name in sizes:
                (kept / name).unlink(missing_ok=True)
                os.link(folder / name, kept / name)
            folder = kept
        self.write("included", folder=os.path.relpath(folder, self.folder), sizes=sizes)

    def curve(self, table: Path, known: Mapping[str, int]) -> None:
        """The steps of train.csv: a cached training wrote no journal in this run. `known`: last logged steps."""
        self.write("curve", path=str(self._keep(table)), known=dict(known))

    def summary(self, values: Mapping[str, float], at: int = 0) -> None:
        """Final values, of this run and of the whole pipeline run; `at` is the training step that they describe."""
        self.write("summary", values=dict(values), at=at)

    def progress(self, done: int, total: int, unit: str) -> None:
        """For the metrics endpoint (services/metrics_endpoint.py); MLflow gets none of it."""
        self.write("progress", done=done, total=total, unit=unit)

    def params(self, values: Mapping[str, Any]) -> None:
        self.write("params", values=dict(values))

    def tags(self, values: Mapping[str, str]) -> None:
        """Of the whole pipeline run."""
        self.write("tags", values=dict(values))

    def dataset(self, name: str, *, digest: str, source: str, rows: int | None = None) -> None:
        self.write("dataset", name=name, digest=digest, source=source, rows=rows)

    def artifact(self, path: Path) -> None:
        self.write("artifact", path=str(self._keep(path)))

    def _keep(self, path: Path) -> Path:
        """The file in the run's folder, copied if need be: the workspace may be gone when it is sent."""
        if not path.resolve().is_relative_to(self.folder.resolve()):
            copy = self.folder / "artifacts" / self.stage / path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            path = Path(shutil.copyfile(path, copy))
        return path.resolve()


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"beta": 0.1}} becomes {"train.beta": 0.1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def flatten_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """evaluate.json with flat names: `samples/policy/kind: 0.97`."""
    return {name.replace(".", "/"): value for name, value in flatten(metrics).items()}
