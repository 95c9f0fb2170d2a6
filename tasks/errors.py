"""The exception for errors that a user can correct: its message says what is wrong, where, and what to do next."""

from tasks.redact import redact


class UserError(Exception):
    """The message goes to terminals, logs and pages, so secrets are redacted from it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))
