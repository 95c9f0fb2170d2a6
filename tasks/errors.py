"""The one exception for what a user can mend: its message says what is wrong, where, and what to do next."""

from tasks.redact import redact


class UserError(Exception):
    """What it says goes to terminals, logs and pages: no secret is in it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))
