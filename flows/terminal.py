"""The output of a run in a terminal: the stages' own lines, progress in place, none of Prefect's own messages."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows import embedded_server
from services import prefect_internals

FLOWS = str(Path(__file__).parent)
PROGRESS = re.compile(r"^(?P<stage>\w+): (?P<done>\d+)/(?P<total>\d+) ")
CLEAR = "\r\x1b[K"
LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


class Terminal(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.in_place = sys.stdout.isatty()
        self.open = False  # the cursor stands behind a progress line

    def emit(self, record: logging.LogRecord) -> None:
        if record.pathname.startswith(FLOWS):  # Prefect's engine writes to the same loggers
            self.show(record.getMessage())

    def show(self, line: str) -> None:
        moving = self.in_place and bool(PROGRESS.match(line))
        print(f"{CLEAR if self.open else ''}{line}", end="" if moving else "\n", flush=True)
        self.open = moving

    def end_line(self) -> None:
        if self.open:
            print(flush=True)
        self.open = False


@contextmanager
def attached() -> Iterator[None]:
    """Start or find a Prefect server, and show a flow's log lines in this terminal."""
    embedded_server.start()
    prefect_internals.set_up_logging()  # before our handler is added: it replaces the handlers of these loggers
    terminal = Terminal()
    for name in LOGGERS:
        logging.getLogger(name).addHandler(terminal)
    try:
        yield
    finally:
        terminal.end_line()
