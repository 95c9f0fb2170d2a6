"""How a command ends: with one sentence for a user error or a full disk, without a traceback."""

import os
import sys
from collections.abc import Callable
from functools import wraps

from tasks.errors import UserError

CLOSED = 141  # what a shell shows for a command that SIGPIPE ended


def as_command(main: Callable[[], None]) -> Callable[[], None]:
    """Decorates a command's `main`. A closed pipe (`dpo runs | head`) ends it silently."""

    @wraps(main)
    def command() -> None:
        try:
            try:
                main()
            finally:
                sys.stdout.flush()  # here: at the interpreter's end nothing could catch its error
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(CLOSED)
        except UserError as error:
            sys.exit(f"error: {error}")
        except Exception as error:
            from tasks.system import disk  # loads pydantic, and `dpo --help` is fast without it

            if (sentence := disk.explain(error)) is None:
                raise
            sys.exit(f"error: {sentence}")

    return command
