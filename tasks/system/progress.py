"""Progress of a stage: a bar with an estimate on a terminal, a line every few seconds in a log.

The line `train: 40/124 steps, eta 0:21, loss 0.41` is what the flow turns into a progress artifact.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY_SECONDS = 2.0
NOTE_SECONDS = 10.0  # between two notes in the journal
Listener = Callable[[int, int, str], None]  # done, total, unit
_listeners: list[Listener] = []


class Bar:
    def __init__(self, stage: str, total: int, unit: str) -> None:
        self.stage, self.total, self.unit = stage, total, unit
        self.printed_at = self.entered_at = time.monotonic()
        self.done = 0
        self.first_update: tuple[float, int] | None = None  # its time and count
        self.bar: Progress | None = None
        self.noted_at = 0.0

    def __enter__(self) -> "Bar":
        self._note(0)
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"))
            self.bar.start()
            self.task = self.bar.add_task(f"{self.stage}: {self.unit}", total=self.total, note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def more(self, count: int) -> None:
        """`count` more are done."""
        self.update(self.done + count)

    def update(self, done: int, note: str = "") -> None:
        """`done` of the total. The speed counts from the first update: no start-up, no steps before a resume."""
        if done == self.done == self.total:  # printed already
            return
        self.first_update, self.done = self.first_update or (time.monotonic(), done), done
        if done == self.total or time.monotonic() - self.noted_at >= NOTE_SECONDS:
            self._note(done)
        if self.bar:
            self.bar.update(self.task, completed=done, note=note)
        elif done == self.total or time.monotonic() - self.printed_at >= EVERY_SECONDS:
            self.printed_at = time.monotonic()
            parts = [f"{self.stage}: {done}/{self.total} {self.unit}", self._eta(done), note]
            print(", ".join(part for part in parts if part), flush=True)

    def say(self, sentence: str) -> None:
        """Print a line above the bar."""
        (self.bar.console.print if self.bar else print)(sentence)

    def _note(self, done: int) -> None:
        self.noted_at = time.monotonic()
        for listener in _listeners:
            listener(done, self.total, self.unit)

    def _eta(self, done: int) -> str:
        assert self.first_update is not None
        since, first = self.first_update
        elapsed = time.monotonic() - since
        # Workers that start together also report together: until one more round is over, the speed looks too high.
        if done in (first, self.total) or elapsed < since - self.entered_at:
            return ""
        seconds = elapsed / (done - first) * (self.total - done)
        return f"eta {int(seconds // 60)}:{int(seconds % 60):02d}"


@contextmanager
def notify(listener: Listener) -> Iterator[None]:
    """Pass the progress of every bar in the block to `listener` too."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def background_thread(watch: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `watch` in a thread beside the block; the event tells it that the block is over. Its error is raised then."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch, over)
        try:
            yield
        finally:
            over.set()
    watcher.result()  # not reached if the block failed: its own error says more
