"""Commands that print lists, and whose reader may leave early: `make runs | head`."""

import os
import sys
from collections.abc import Callable
from functools import wraps

CLOSED = 141  # what a shell shows for a command that SIGPIPE ended


def pipeable(main: Callable[[], None]) -> Callable[[], None]:
    """Of a command's `main`: it ends without a traceback where its reader has gone."""

    @wraps(main)
    def quiet() -> None:
        try:
            try:
                main()
            finally:
                sys.stdout.flush()  # here and not at the interpreter's end, where nobody could catch it
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(CLOSED)

    return quiet
