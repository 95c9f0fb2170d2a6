"""The one exception for what a user can mend: its message says what is wrong, where, and what to do next."""


class UserError(Exception):
    pass
