"""How a command ends that is no stage: with a sentence where the user or the disk is at fault, never a traceback."""

import os
import sys
from collections.abc import Callable
from functools import wraps

from tasks.errors import UserError

CLOSED = 141  # what a shell shows for a command that SIGPIPE ended


def as_command(main: Callable[[], None]) -> Callable[[], None]:
    """Of a command's `main`. A reader that has gone (`make runs | head`) ends it without a word."""

    @wraps(main)
    def told() -> None:
        try:
            try:
                main()
            finally:
                sys.stdout.flush()  # here and not at the interpreter's end, where nobody could catch it
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(CLOSED)
        except UserError as error:
            sys.exit(f"error: {error}")
        except Exception as error:
            from tasks import disk

            if (sentence := disk.explain(error)) is None:
                raise
            sys.exit(f"error: {sentence}")

    return told
