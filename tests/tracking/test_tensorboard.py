"""TensorBoard's event files, read back: every metric of every step once, however often the stage starts again."""

import json
import threading
from pathlib import Path

from tasks.system.progress import Bar
from tasks.tracking.journal import StageJournal
from tasks.tracking.tensorboard import Events
from tasks.train.driver import forward_metrics
from tests.support.workspaces import tensorboard


def write(journal: Path, step: int, **values: float) -> None:
    with journal.open("a") as file:
        file.write(json.dumps({"kind": "metrics", "step": step, "values": values}) + "\n")


def watch(folder: Path) -> None:
    """What the stage does while workers train, here after they have."""
    over, events = threading.Event(), Events(folder / "tensorboard")
    over.set()
    with Bar("train", 3, "steps") as bar:
        forward_metrics(folder / "metrics.jsonl", StageJournal(folder, "train"), bar, events, over)
    events.close()


def test_a_stage_that_goes_on_shows_each_step_once(tmp_path: Path):
    journal = tmp_path / "metrics.jsonl"
    write(journal, 1, **{"loss": 0.5, "rewards/accuracies": 0.25})
    write(journal, 2, **{"loss": 0.375, "rewards/accuracies": 0.5})
    watch(tmp_path)
    write(journal, 2, **{"loss": 0.375, "rewards/accuracies": 0.5})  # a group that starts again repeats a step
    write(journal, 2, **{"eval/loss": 0.75})
    write(journal, 3, **{"loss": 0.25, "rewards/accuracies": 1.0})
    watch(tmp_path)
    assert tensorboard(tmp_path / "tensorboard") == {
        "loss": [(1, 0.5), (2, 0.375), (3, 0.25)],
        "rewards/accuracies": [(1, 0.25), (2, 0.5), (3, 1.0)],
        "eval/loss": [(2, 0.75)],
    }


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    events = Events(None)
    events.add(1, {"loss": 0.5})
    events.close()
    assert not list(tmp_path.iterdir())
