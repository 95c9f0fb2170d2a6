"""The journal of feedback: JSON lines on disk, which tasks/tracking/traces.py sends to MLflow.

Each writer process has its own file and holds a lock on it, so the sender knows when nobody writes to it any more.
"""

import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tasks.config.paths import home
from tasks.feedback.events import Answer, Event, check, from_json, to_json
from tasks.redact import redact, redacted

LARGEST_FILE = 64 * 2**20  # bytes after which a writer begins a new file: a sent file can be deleted


def feedback_folder() -> Path:
    return home() / ".scratch" / "feedback"


class FeedbackJournal:
    """Threads may share one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or feedback_folder()
        self._writing, self._syncing = threading.Lock(), threading.Lock()
        self._written = self._synced = 0
        self._torn = False
        self._file = -1

    def append(self, event: Event) -> None:
        """On disk when this returns. ValueError for an invalid event. Threads that wait share one fsync."""
        check(event)
        line = json.dumps(to_json(_without_secrets(event)), ensure_ascii=False).encode() + b"\n"
        with self._writing:
            self._write(line)
            self._written += 1
            mine = self._written
        with self._syncing:
            if self._synced < mine:
                written = self._written
                os.fsync(self._file)
                self._synced = written

    def _write(self, line: bytes) -> None:
        if self._file < 0 or os.fstat(self._file).st_size >= LARGEST_FILE:
            self._open()
        line = b"\n" + line if self._torn else line
        self._torn = True  # until the whole line is written: a full disk may take half of it
        if os.write(self._file, line) < len(line):
            raise OSError(f"{self.folder} took only a part of an event: the disk is full")
        self._torn = False

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = f"{int(time.time())}-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
        with self._syncing:
            new = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(new, fcntl.LOCK_EX)
            _sync_folder(self.folder)
            if self._file >= 0:
                os.fsync(self._file)
                os.close(self._file)
            self._file = new


def _without_secrets(event: Event) -> Event:
    """Tokens and passwords that somebody pastes reach neither MLflow nor the training data."""
    if isinstance(event, Answer):
        texts = {"messages": redacted(event.messages), "text": redact(event.text)}
        return replace(event, **texts, parameters=redacted(event.parameters))
    return replace(event, value=redact(event.value))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def read_events(journal: Path, offset: int = 0, most: int | None = None) -> tuple[list[Event], int]:
    """At most `most` events behind a byte offset, and the offset behind them."""
    events = list[Event]()
    for event, _, offset in _lines(journal, offset):
        events += [event] if event else []
        if len(events) == most:
            break
    return events, offset


def _lines(journal: Path, offset: int = 0) -> Iterator[tuple[Event | None, int, int]]:
    """(event, start, end) of each complete line; None for what a killed writer left or `blank` has overwritten."""
    with journal.open("rb") as file:
        file.seek(offset)
        while (line := file.readline()).endswith(b"\n"):
            start, offset = offset, offset + len(line)
            try:
                yield from_json(json.loads(line)), start, offset
            except (ValueError, TypeError, KeyError):
                yield None, start, offset


def is_closed(journal: Path) -> bool:
    """Whether no process writes to it any more."""
    with journal.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def blank(journal: Path, ids: set[str]) -> None:
    """Overwrite the lines of these events with spaces: offsets stay, and a process may write to the file meanwhile."""
    with journal.open("r+b") as file:
        for event, start, end in _lines(journal):
            if event and event.id in ids:
                file.seek(start)
                file.write(b" " * (end - start - 1))
        file.flush()
        os.fsync(file.fileno())
