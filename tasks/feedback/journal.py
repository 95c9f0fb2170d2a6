"""The journal of feedback: JSON lines on disk, which tasks/feedback/traces.py sends to MLflow.

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
from io import FileIO
from pathlib import Path

from tasks.config.paths import main_checkout
from tasks.feedback.events import Answer, Event, check, from_json, to_json
from tasks.secrets.redact import redact, redacted
from tasks.system.files import sync

LARGEST_FILE = 64 * 2**20  # bytes after which a writer begins a new file: a sent file can be deleted


def feedback_folder() -> Path:
    return main_checkout() / ".scratch" / "feedback"


class FeedbackJournal:
    """Thread-safe: threads may share a journal."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or feedback_folder()
        self._lock = threading.Lock()
        self._torn = False
        self._file: FileIO | None = None

    def append(self, event: Event) -> None:
        """Write an event and sync it to disk. ValueError for an invalid event."""
        content = to_json(_without_secrets(check(event)))
        line = json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._file is None or self._file.tell() >= LARGEST_FILE:
                self._file = self._open()
            line = b"\n" + line if self._torn else line
            self._torn = True  # until the whole line is written: a full disk may take half of it
            if (self._file.write(line) or 0) < len(line):
                raise OSError(f"{self.folder} took only a part of an event: the disk is full")
            self._torn = False
            os.fsync(self._file)

    def _open(self) -> FileIO:
        """A new file, locked until this object or its process is gone; the sender sees it only when it is locked."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.folder / f"{int(time.time())}-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
        aside = path.with_suffix(".new")
        file = FileIO(aside, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
        fcntl.flock(file, fcntl.LOCK_EX)
        aside.rename(path)
        sync(self.folder)
        if self._file is not None:
            self._file.close()
        return file


def _without_secrets(event: Event) -> Event:
    """Tokens and passwords that somebody pastes reach neither MLflow nor the training data."""
    if isinstance(event, Answer):
        texts = {"messages": redacted(event.messages), "text": redact(event.text)}
        return replace(event, **texts, parameters=redacted(event.parameters))
    return replace(event, value=redact(event.value))


def stored_events(folder: Path) -> list[Event]:
    """The events of all journals in a folder."""
    return [event for path in sorted(folder.glob("*.jsonl")) for event in read_events(path)[0]]


def read_events(journal: Path, offset: int = 0, most: int | None = None) -> tuple[list[Event], int]:
    """At most `most` events behind a byte offset, and the offset behind them."""
    events = list[Event]()
    for event, _, end in _lines(journal, offset):
        offset = end
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
