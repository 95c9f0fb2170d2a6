"""TensorBoard's event files, read back: every metric of every step once, however often the stage starts again."""

import threading
from pathlib import Path

from tasks.system.progress import Bar
from tasks.tracking.journal import Journal
from tasks.tracking.tensorboard import Events
from tasks.train.progress import show_progress
from tests.support.workspaces import tensorboard


def watch(training: Journal, folder: Path) -> None:
    """What the stage does while workers train, here after they have."""
    over, events = threading.Event(), Events(folder / "tensorboard")
    over.set()
    with Bar("train", 3, "steps") as bar:
        show_progress(training.path, "train", bar, events, over)
    events.close()


def test_a_stage_that_goes_on_shows_each_step_once(tmp_path: Path):
    training = Journal(tmp_path / "metrics.jsonl")
    training.metrics(1, {"loss": 0.5, "rewards/accuracies": 0.25})
    training.metrics(2, {"loss": 0.375, "rewards/accuracies": 0.5})
    watch(training, tmp_path)
    training.metrics(2, {"loss": 0.375, "rewards/accuracies": 0.5})  # a group that starts again repeats a step
    training.metrics(2, {"eval/loss": 0.75})
    training.metrics(3, {"loss": 0.25, "rewards/accuracies": 1.0})
    watch(training, tmp_path)
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
