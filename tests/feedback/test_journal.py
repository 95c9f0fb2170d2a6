"""The journal on disk: what it takes, what it refuses, and what a killed writer leaves."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.feedback import journal
from tasks.feedback.journal import FeedbackJournal, blank, is_closed, read_events
from tests.support.feedback import answer, feedback, new_id, vote, written
from tests.support.workspaces import PROJECT

ONE, TWO = answer(), answer()
INVALID = {
    "id: String should match": replace(ONE, id="7"),
    "time: Input should be greater than 0": replace(ONE, time=-1.0),
    "messages: List should have at least 1 item": replace(ONE, messages=[]),
    "messages: each must have a role": replace(ONE, messages=[{"role": "robot", "content": "x"}]),
    "text: String should have at most 200000 characters": replace(ONE, text="x" * 200_001),
    "text: String should match": replace(ONE, text="a\0b"),
    "text: Input should be a valid string": replace(ONE, text="\ud800"),
    "model: String should match": replace(ONE, model="../x"),
    "role: String should match": replace(ONE, role="king"),
    "user: a name has at most 250 characters": replace(ONE, user="x" * 251),
    "parameters.a: input was not a valid JSON value": replace(ONE, parameters={"a": {1, 2}}),
    "answer: String should match": feedback(ONE, answer=""),
    "rater: a rater's name is missing": feedback(ONE, rater=" "),
    "kind: Input should be 'thumb', 'edit' or 'preference'": feedback(ONE, kind="star"),
    "value of a thumb must be one of up, down": feedback(ONE, value="sideways"),
    "value must be the corrected answer": feedback(ONE, kind="edit", value=" "),
    "value of a preference": vote(ONE, TWO, "bob", "left"),
    "other must be the id of the second": vote(ONE, ONE, "bob", "first"),
    "other must be empty": feedback(ONE, other=TWO.id),
    "other: String should match": vote(ONE, replace(TWO, id="7"), "bob", "first"),
    "Out of range float values are not JSON compliant": replace(ONE, parameters={"a": float("nan")}),
}


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_event_is_refused_and_nothing_is_written(message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        FeedbackJournal(tmp_path).append(INVALID[message])
    assert list(tmp_path.iterdir()) == []


def test_threads_share_a_journal_and_every_event_is_read_back(tmp_path: Path):
    events = [[answer() for _ in range(20)] for _ in range(4)]
    shared = FeedbackJournal(tmp_path)
    threads = [threading.Thread(target=lambda some=some: [shared.append(event) for event in some]) for some in events]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = tmp_path.glob("*.jsonl")
    found, end = read_events(file)
    assert {event.id for event in found} == {event.id for some in events for event in some}
    assert end == file.stat().st_size
    assert file.stat().st_mode & 0o077 == 0  # only its owner reads what people wrote


def test_half_a_line_is_skipped_and_a_read_goes_on_where_the_last_one_ended(tmp_path: Path):
    kept = written(tmp_path, ONE, TWO)
    (file,) = tmp_path.glob("*.jsonl")
    some, offset = read_events(file, 0, 1)
    assert some == [ONE]
    with file.open("ab") as torn:
        torn.write(b'{"event": "answer", "id": "12')
    assert read_events(file, offset) == ([TWO], file.stat().st_size - 29)
    with file.open("ab") as torn:  # as `append` goes on after a disk that was full
        torn.write(b"\n")
    kept.append(late := feedback(ONE))
    assert read_events(file)[0] == [ONE, TWO, late]


def test_a_writer_begins_a_new_file_when_the_last_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "LARGEST_FILE", 1)
    kept = written(tmp_path, ONE, TWO)
    files = sorted(tmp_path.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    assert [read_events(file)[0] for file in files] == [[ONE], [TWO]]
    assert [is_closed(file) for file in files] == [True, False]
    del kept


def test_the_sender_never_sees_a_file_that_its_writer_has_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would take the empty file for one whose writer has ended, and delete it."""
    visible = []
    lock = journal.fcntl.flock
    monkeypatch.setattr(journal.fcntl, "flock", lambda *given: (visible.extend(tmp_path.glob("*.jsonl")), lock(*given)))
    kept = written(tmp_path, ONE)
    assert visible == []
    assert not is_closed(next(tmp_path.glob("*.jsonl")))
    del kept


def test_blanking_an_event_keeps_the_offsets_of_the_others(tmp_path: Path):
    written(tmp_path, ONE, TWO, third := answer())
    (file,) = tmp_path.glob("*.jsonl")
    offset, size = read_events(file, 0, 2)[1], file.stat().st_size
    blank(file, {TWO.id})
    assert file.stat().st_size == size
    assert read_events(file)[0] == [ONE, third]
    assert read_events(file, offset)[0] == [third]
    assert TWO.id.encode() not in file.read_bytes()


def test_a_pasted_secret_does_not_reach_the_disk(tmp_path: Path):
    token = "hf_" + "a1B2" * 6
    written(tmp_path, answer(messages=[{"role": "user", "content": f"my token is {token}"}]))
    (file,) = tmp_path.glob("*.jsonl")
    assert token not in file.read_text()


def test_what_append_returned_for_survives_kill_9(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from tests.support.feedback import answer, written\n"
        "kept = written(Path(sys.argv[1]))\n"
        "while True:\n    kept.append(a := answer()); print(a.id, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        said = [process.stdout.readline().strip() for _ in range(30)]
        process.kill()
        said += process.stdout.read().split()
    (file,) = tmp_path.glob("*.jsonl")
    found = {event.id for event in read_events(file)[0]}
    assert {line for line in said if len(line) == 32} <= found
    assert is_closed(file)
    assert new_id() not in found
