"""The journal of a stage: JSON lines on disk, which another process sends to MLflow (uploader.py).

So a tracking server that is slow or down never delays a stage. The next stage, the next run or `dpo sync` sends the
lines that could not be sent.
"""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.secrets.redact import redacted
from tasks.system.files import read_json_or_empty
from tasks.system.lock import file_lock

FLOW = "flow"  # the journal of the pipeline run itself
UPLOADER_LOCK = "upload.lock"  # in the run's folder; the uploader holds it


class StageJournal:
    """One stage's run, as a journal."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.stage = folder, stage
        self.journal = folder / f"{stage}.jsonl"
        self.logged = last_steps(self.journal)
        self._file = self.journal.open("a", buffering=1)
        if self.journal.read_bytes()[-1:] not in (b"", b"\n"):  # a killed stage wrote half a line
            self._file.write("\n")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a step; a step that a resumed stage repeats is not logged twice."""
        new = {name: value for name, value in values.items() if step > self.logged.get(name, -1)}
        if new:
            self.logged.update(dict.fromkeys(new, step))
            self.write("metrics", step=step, values=new)

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
        """A file, copied into the run's folder first: the workspace may be gone when it is sent."""
        if not path.resolve().is_relative_to(self.folder.resolve()):
            copy = self.folder / "artifacts" / self.stage / path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            path = Path(shutil.copyfile(path, copy))
        self.write("artifact", path=str(path.resolve()))

    def write(self, kind: str, **content: Any) -> None:
        line = {"kind": kind, "time": int(time.time() * 1000), **redacted(content)}
        self._file.write(json.dumps(line, default=str) + "\n")


def read_lines(journal: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The complete lines from a byte offset on, and the offset behind them."""
    if not journal.exists():
        return [], offset
    with journal.open("rb") as file:
        file.seek(offset)
        data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    lines = [_parsed(line) for line in complete.splitlines()]
    return [line for line in lines if line is not None], offset + len(complete)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:  # half a line of a killed stage
        return None


def last_steps(journal: Path) -> dict[str, int]:
    """The last logged step of each metric."""
    steps: dict[str, int] = {}
    for line in read_lines(journal)[0]:
        if line["kind"] == "metrics":
            steps.update(dict.fromkeys(line["values"], line["step"]))
    return steps


def sent(folder: Path, stage: str) -> int:
    """How many bytes of a journal have been sent. Sending a line twice has no effect (mlflow_writer.py)."""
    return int(read_json_or_empty(folder / f"{stage}.sent.json").get("offset", 0))


def unsent(folder: Path) -> bool:
    """Whether complete lines of any journal still have to be sent."""
    offsets = {path: sent(folder, path.stem) for path in folder.glob("*.jsonl")}
    return any(read_lines(path, offset)[1] > offset for path, offset in offsets.items())


def is_sending(folder: Path) -> bool:
    """Whether an uploader is working on the run."""
    with file_lock(folder / UPLOADER_LOCK, wait=False) as acquired:
        return not acquired


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
