"""The exception for errors that a user can correct: its message says what is wrong, where, and what to do next."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from tasks.secrets.redact import redact


class UserError(Exception):
    """The message goes to terminals, logs and pages, so secrets are redacted from it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))


def problems(errors: Iterable[Any]) -> str:
    """The first of the errors that pydantic found, in one line and without the values, which may be private."""
    lines = (f"{'.'.join(map(str, error['loc'])) or 'body'}: {error['msg']}" for error in islice(errors, 5))
    return "; ".join(line.replace("Value error, ", "") for line in lines)
