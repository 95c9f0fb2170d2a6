"""What a person sees of a run in a terminal: the stages' own lines, progress in place, nothing of Prefect's."""

import logging
import re
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
PROGRESS = re.compile(r"^\w+: \d+/\d+ ")
CLEAR = "\r\x1b[K"


class Terminal(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.in_place = sys.stdout.isatty()
        self.open = False  # the cursor stands behind a progress line

    def emit(self, record: logging.LogRecord) -> None:
        if not record.pathname.startswith(HERE):  # the engine's own messages go to the same loggers
            return
        self.show(record.getMessage())

    def show(self, line: str) -> None:
        moving = self.in_place and bool(PROGRESS.match(line))
        print(f"{CLEAR if self.open else ''}{line}", end="" if moving else "\n", flush=True)
        self.open = moving

    def end_line(self) -> None:
        if self.open:
            print(flush=True)
        self.open = False


def attach() -> Terminal:
    from prefect.logging.configuration import setup_logging

    setup_logging()  # before our handler joins: it replaces the handlers of these loggers
    terminal = Terminal()
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addHandler(terminal)
    return terminal
