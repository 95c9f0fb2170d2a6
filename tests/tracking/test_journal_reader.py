"""Journals that include a training's, read by several readers: every value once, and of this stage alone."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.system.processes import this_process
from tasks.tracking.journal import FLOW, Journal, StageJournal
from tasks.tracking.journal_reader import START, Line, Position, read_journal, unsent
from tasks.tracking.uploader import UnfinishedStages


@pytest.fixture
def training(tmp_path: Path) -> Journal:
    (tmp_path / "train" / "hash").mkdir(parents=True)
    return Journal(tmp_path / "train" / "hash" / "metrics.jsonl")


def make_run(tmp_path: Path, name: str) -> StageJournal:
    (tmp_path / "runs" / name).mkdir(parents=True)
    return StageJournal(tmp_path / "runs" / name, "train")


def losses(lines: list[Line]) -> list[tuple[int, float]]:
    return [(line["step"], line["values"]["loss"]) for line in lines if line["kind"] == "metrics"]


def train(training: Journal, *steps: int) -> None:
    for step in steps:
        training.metrics(step, {"loss": 1 / step})


def test_a_run_shows_its_training_up_to_its_own_end(tmp_path: Path, training: Journal) -> None:
    """The first run stops at step 3; the second continues the same training, and shows all of it."""
    first, second = make_run(tmp_path, "first"), make_run(tmp_path, "second")
    with first.including(training.path.parent):
        train(training, 1, 2, 3)
    first.write("end", status="FAILED")
    with second.including(training.path.parent):
        train(training, 3, 4)  # it starts from the checkpoint of step 2
    second.write("end", status="FINISHED")
    assert losses(read_journal(first.path)[0]) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert losses(read_journal(second.path)[0]) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert read_journal(first.path)[0][-1]["status"] == "FAILED"  # after the values, so that MLflow ends the run last


def test_a_value_is_written_once(tmp_path: Path, training: Journal) -> None:
    run = make_run(tmp_path, "run")
    with run.including(training.path.parent):
        train(training, 1, 2)
    assert '"values"' not in run.path.read_text()


def write_all(run: StageJournal, training: Journal) -> list[Any]:
    """A stage with two attempts, as separate writes: killed inside a line, and resumed with another node."""
    other, folder = Journal(training.path.with_name("usage-1.jsonl")), training.path.parent

    def die() -> None:
        with training.path.open("a") as file:
            file.write('{"kind": "metr')

    include = "../../train/hash"
    return [
        lambda: run.write("start", pid=1),
        lambda: run.write("include", folder=include),
        lambda: train(training, 1),
        lambda: run.progress(1, 4, "steps"),
        lambda: train(training, 2),
        die,
        lambda: run.write("start", pid=2),
        lambda: run.write("include", folder=include),
        lambda: train(training, 2),
        lambda: other.metrics(2, {"system/node1/cpu": 50.0}),
        lambda: train(training, 3),
        lambda: run.end_include(folder),
        lambda: run.write("end", status="FINISHED"),
    ]


def test_readers_that_come_at_any_moment_read_the_same(tmp_path: Path, training: Journal) -> None:
    """One reads after every write, others from some moment on; each continues from its stored position."""
    run = make_run(tmp_path, "run")
    writes = write_all(run, training)
    readers: dict[int, tuple[list[Line], Position]] = {}
    for number, write in enumerate(writes):
        write()
        readers[number] = [], START
        for begun in (0, number):  # one that follows, and one that reads twice: now and at the end
            lines, position = readers[begun]
            new, position = read_journal(run.path, position)
            readers[begun] = lines + new, position
    expected = {(step, "loss", 1 / step) for step in (1, 2, 3)} | {(2, "system/node1/cpu", 50.0)}
    for lines, position in readers.values():
        new, last = read_journal(run.path, position)
        metrics = [line for line in lines + new if line["kind"] == "metrics"]
        points = [(line["step"], *item) for line in metrics for item in line["values"].items()]
        assert len(points) == len(set(points))
        assert set(points) == expected
        assert read_journal(run.path, last) == ([], last)


def test_the_uploader_closes_what_a_killed_stage_included(tmp_path: Path, training: Journal) -> None:
    run = make_run(tmp_path, "run")
    run.write("start", **{**this_process(), "began": 0})
    run.write("include", folder="../../train/hash")
    train(training, 1, 2)
    read, position = read_journal(run.path)
    assert losses(read) == [(1, 1.0), (2, 0.5)]
    assert unsent(run.folder)
    UnfinishedStages(run.folder).any_running()
    train(training, 3)  # by the next run
    new, position = read_journal(run.path, position)
    assert [line["kind"] for line in new] == ["end"]
    assert position.folder is None
    assert losses(read_journal(run.path)[0]) == losses(read)


def test_a_run_keeps_the_values_of_a_training_that_starts_anew(tmp_path: Path, training: Journal) -> None:
    """`resume_from_checkpoint: never` deletes the training's folder, perhaps before MLflow has the first run."""
    first, second = make_run(tmp_path, "first"), make_run(tmp_path, "second")
    with first.including(training.path.parent):
        train(training, 1, 2)
        early, position = read_journal(first.path)
        train(training, 3)
    first.write("end", status="FINISHED")
    shutil.rmtree(training.path.parent)
    training.path.parent.mkdir()
    with second.including(training.path.parent):
        train(training, 1)
        assert losses(read_journal(first.path)[0]) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
        assert losses(early + read_journal(first.path, position)[0]) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
        assert losses(read_journal(second.path)[0]) == [(1, 1.0)]
        shutil.rmtree(training.path.parent)
        assert read_journal(second.path)[0] == []  # deleted by hand: nothing to read, and no error
    assert os.stat(first.folder / "included/hash/metrics.jsonl").st_nlink == 1


def test_on_another_file_system_the_values_stay_with_the_training(
    tmp_path: Path, training: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    run = make_run(tmp_path, "run")
    with run.including(training.path.parent):
        train(training, 1)
    run.write("end", status="FINISHED")
    assert losses(read_journal(run.path)[0]) == [(1, 1.0)]


def test_a_cached_training_shows_the_rows_of_its_table_that_the_run_lacks(tmp_path: Path, training: Journal) -> None:
    """Even if the workspace is gone before they are sent, and always with the same time."""
    run = make_run(tmp_path, "run")
    with run.including(training.path.parent):
        train(training, 1, 2)
    table = tmp_path / "train.csv"
    table.write_text("step,loss,eval/loss\n1,1.0,\n2,0.5,0.75\n3,0.25,0.5\n")
    flow = StageJournal(run.folder, FLOW)
    flow.curve(table, read_journal(run.path)[1].steps)
    table.unlink()
    lines, position = read_journal(flow.path)
    assert [(line["step"], line["values"]) for line in lines] == [
        (2, {"eval/loss": 0.75}),
        (3, {"loss": 0.25, "eval/loss": 0.5}),
    ]
    assert read_journal(flow.path) == (lines, position)
    assert read_journal(flow.path, position) == ([], position)
