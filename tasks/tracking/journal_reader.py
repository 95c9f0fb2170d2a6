"""Reads journals (journal.py) on from a position, each step of a metric once.

The uploader, the copy in W&B, TensorBoard, the progress bar, the metrics endpoint and the run report all read here.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tasks.system.files import read_json_or_empty
from tasks.tracking.results import read_csv

Line = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """How far a reader has come in the journal of a stage."""

    offset: int = 0  # bytes of the journal itself
    folder: str | None = None  # the folder that it includes there, relative to the run's folder
    files: Mapping[str, int] = field(default_factory=dict)  # bytes of each journal in that folder, by name
    steps: Mapping[str, int] = field(default_factory=dict)  # the last step of each metric


START = Position()


def read_journal(journal: Path, since: Position = START) -> tuple[list[Line], Position]:
    """The new complete lines of a stage, those of the journals that it includes among them, and the next position."""
    own, offset = read_lines(journal, since.offset)
    folder, files, steps = since.folder, dict(since.files), dict(since.steps)
    lines: list[Line] = []
    for line in own:
        match line["kind"]:
            case "include":
                folder, files = line["folder"], {}
            case "included":
                lines += _read_folder(journal, line["folder"], files, line["sizes"])
                folder, files = None, {}
            case "curve":
                steps = {**line["known"], **steps}
                lines += _rows(line)
            case _:
                lines.append(line)
    lines += _read_folder(journal, folder, files)
    return list(without_repeats(lines, steps)), Position(offset, folder, files, steps)


def _read_folder(
    journal: Path, folder: str | None, files: dict[str, int], sizes: Mapping[str, int] | None = None
) -> list[Line]:
    """The new lines of the included journals, up to `sizes`. Brings `files` up to date."""
    lines: list[Line] = []
    for path in sorted(included_folder(journal, folder).glob("*.jsonl")) if folder else ():
        if sizes is None or path.name in sizes:
            end = None if sizes is None else sizes[path.name]
            new, files[path.name] = read_lines(path, files.get(path.name, 0), end)
            lines += new
    return lines


def included_folder(journal: Path, folder: str) -> Path:
    return Path(os.path.normpath(journal.parent / folder))


def _rows(curve: Line) -> list[Line]:
    """Rows of train.csv as lines. With the time of the reference: sent again, they are the same points."""
    rows = read_csv(Path(curve["path"]))
    return [{"kind": "metrics", "time": curve["time"], "step": int(row.pop("step")), "values": row} for row in rows]


def without_repeats(lines: list[Line], steps: dict[str, int]) -> Iterator[Line]:
    """Without values of steps that a restart repeated. Brings `steps` up to date."""
    for line in lines:
        if line["kind"] == "metrics":
            new = {name: value for name, value in line["values"].items() if line["step"] > steps.get(name, -1)}
            steps.update(dict.fromkeys(new, line["step"]))
            if new:
                yield {**line, "values": new}
        else:
            yield line


def read_lines(file: Path, offset: int = 0, end: int | None = None) -> tuple[list[Line], int]:
    """The complete lines of one file from a byte offset on, and the offset behind them."""
    if not file.exists():
        return [], offset
    with file.open("rb") as opened:
        opened.seek(offset)
        data = opened.read(-1 if end is None else max(0, end - offset))
    complete = data[: data.rfind(b"\n") + 1]
    lines = [_parsed(line) for line in complete.splitlines()]
    return [line for line in lines if line is not None], offset + len(complete)


def _parsed(line: bytes) -> Line | None:
    try:
        return json.loads(line)
    except ValueError:  # half a line of a killed process
        return None


def last_step(journal: Path, tail: int = 1 << 16) -> int:
    """The step of a journal's last metrics; 0 without any."""
    size = journal.stat().st_size if journal.exists() else 0
    lines, _ = read_lines(journal, max(0, size - tail))
    return next((line["step"] for line in reversed(lines) if line["kind"] == "metrics"), 0)


def sent(folder: Path, stage: str) -> Position:
    """How far a journal has been sent to MLflow. Sending a line twice has no effect (mlflow_writer.py)."""
    return Position(**read_json_or_empty(folder / f"{stage}.sent.json"))


def unsent(folder: Path) -> bool:
    """Whether complete lines of any journal still have to be sent."""
    return bool(read_run(folder, partial(sent, folder)))


def read_run(folder: Path, since: Callable[[str], Position]) -> dict[str, tuple[list[Line], Position]]:
    """By stage: the lines behind the position `since` that a run's journals have, and the position behind them."""
    positions = {path: since(path.stem) for path in sorted(folder.glob("*.jsonl"))}
    new = {path: read_journal(path, position) for path, position in positions.items()}
    return {path.stem: read for path, read in new.items() if read[1] != positions[path]}
