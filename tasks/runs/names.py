"""What a run may be called: its name becomes a folder, a worktree and the branch runs/<name>.

The pattern holds for the forms of Prefect's pages (JavaScript), for Prefect's server and for us (Python). It excludes
what git refuses in a branch's name with these characters: two dots in a row, and a dot or `.lock` at the end.
"""

import re

from tasks.errors import UserError

LONGEST = 200  # a folder may have 255 characters; a sweep and its runs append theirs
# `$` alone would take a line break at the end: Python's matches before it.
NAME = rf"^(?!.*(\.\.|\.lock$|\.$))[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}$(?!\n)"


def check_name(name: str) -> str:
    if not re.search(NAME, name):
        shown = name if len(name) <= LONGEST else f"{name[:40]}... ({len(name)} characters)"
        raise UserError(
            f"A run cannot be named {shown!r}. Use up to {LONGEST} letters (A to Z), digits, dots, dashes and "
            "underscores, first a letter or digit, no two dots in a row, and no dot or `.lock` at the end."
        )
    return name
