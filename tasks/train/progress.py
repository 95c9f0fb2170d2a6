"""What a stage reads in the journal of its training: messages, the progress bar, TensorBoard, the table of steps."""

import csv
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from tasks.system.progress import Bar
from tasks.tracking.journal_reader import read_lines, without_repeats
from tasks.tracking.tensorboard import Events

KEYS_OF_TRAIN = re.compile(r"\btrain\.(?=\w)")  # in messages of training/
SPEED_METRICS = (
    "tokens_per_second",
    "pairs_per_second",
    "mfu",
    "mfu_datasheet",
    "peak_memory_gib",
    "checkpoint_seconds",
)


def show_progress(journal: Path, stage: str, bar: Bar, events: Events, stop: threading.Event) -> None:
    """Show what rank 0 writes in the progress bar and TensorBoard, until `stop` is set."""
    offset, stopped, steps = 0, False, dict[str, int]()
    while not stopped:
        stopped = stop.wait(0.5)
        lines, offset = read_lines(journal, offset)
        for line in lines:
            if line["kind"] == "note":
                bar.say(f"{stage}: {name_keys(line['text'], stage)}")
            elif "loss" in line["values"]:
                bar.update(line["step"], f"loss {line['values']['loss']:.3f}{_accuracy(line['values'])}")
        for line in without_repeats(lines, steps):
            if line["kind"] == "metrics":
                events.add(line["step"], line["values"])


def _accuracy(values: Mapping[str, float]) -> str:
    """Empty at the first step: policy and reference are equal there, and an accuracy of ties reads like a failure."""
    shown = values.get("rewards/accuracies", 0.0) or values.get("rewards/margins", 0.0)
    return f", reward accuracy {values['rewards/accuracies']:.2f}" if shown else ""


def name_keys(message: str, stage: str) -> str:
    """A message of training/ with the names of the section that the user has set."""
    return KEYS_OF_TRAIN.sub(f"{stage}.", message)


def metrics_by_step(journal: Path) -> dict[int, dict[str, float]]:
    """The last values of each step, which a restart may repeat; without speeds, which differ from run to run."""
    steps: dict[int, dict[str, float]] = {}
    for line in (line for line in read_lines(journal)[0] if line["kind"] == "metrics"):
        values = {name: value for name, value in line["values"].items() if name not in SPEED_METRICS}
        if values:
            steps.setdefault(line["step"], {}).update(values)
    return dict(sorted(steps.items()))


def write_table(path: Path, steps: dict[int, dict[str, float]]) -> None:
    """train.csv: a row for each step."""
    columns = sorted({name for row in steps.values() for name in row})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"step": step, **row} for step, row in steps.items())
