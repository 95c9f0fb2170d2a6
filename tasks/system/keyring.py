"""The files of tasks/secrets/private.py: create them, and move those that an earlier version kept in the checkout.

A symbolic link stays at the old place: runs from before the upgrade go on with the code of their worktree, which reads
the file there and would make another one.
"""

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path

from tasks.errors import UserError
from tasks.secrets.private import SERVICES, checkout_folder, checkout_of, forget_values, user_folder
from tasks.system.files import sync, temporary
from tasks.system.lock import file_lock


def private_file(name: str, checkout: Path) -> Path:
    """The path of a checkout's private file, whether it exists or not."""
    path, old = checkout_folder(checkout) / name, former_file(name, checkout)
    if not os.path.exists(old) or leads_to(old, path):  # unlike Path.exists, False in a folder of another user
        return path
    if is_foreign(old):
        return old
    move(old, path, replace=True)  # from a backup, for example: it is the one that the user wants
    return path


def former_file(name: str, checkout: Path) -> Path:
    """Where an earlier version kept the file."""
    return checkout_of(checkout) / SERVICES / name


def is_foreign(path: Path) -> bool:
    """Whether the file belongs to another user, as for a `sudo` in somebody's checkout: then it stays where it is."""
    return path.stat().st_uid != os.geteuid()


def leads_to(old: Path, new: Path) -> bool:
    """Whether the file was moved: its old place is a link to the new one."""
    return old.is_symlink() and os.path.realpath(old) == os.path.realpath(new)


def move(old: Path, new: Path, replace: bool = False) -> bool:
    """Move a file and leave a link. If `new` has another content, `replace` keeps it under another name; else the
    answer is False, and nothing moves."""
    make_folder(new.parent)
    try:
        with file_lock(user_folder() / ".lock"):
            if leads_to(old, new):  # another process was faster
                return True
            content = old.read_text()
            create(new, content)
            if new.read_text() != content:
                if not replace:
                    return False
                digest = hashlib.sha256(new.read_bytes()).hexdigest()[:8]
                os.replace(new, new.with_name(f"{new.stem}-{digest}{new.suffix}"))
                create(new, content)
            with temporary(old) as aside:
                aside.symlink_to(new)
                os.replace(aside, old)
            sync(old.parent)
    except OSError as error:
        raise UserError(f"{old} cannot be moved to {new}: {error}. Move it yourself.") from None
    forget_values()
    print(f"{old} is now {new}: keys and passwords are kept outside of the checkout.", file=sys.stderr, flush=True)
    return True


def create(path: Path, text: str) -> None:
    """Write a private file unless there is one: of two processes at the same time, one wins."""
    make_folder(path.parent)
    with temporary(path) as aside, suppress(FileExistsError):
        aside.touch(mode=0o600)
        aside.write_text(text)
        sync(aside)
        os.link(aside, path)
    sync(path.parent)
    forget_values()


def make_folder(folder: Path) -> None:
    """A private folder, and those above it up to the user's."""
    try:
        if not user_folder().is_absolute():
            raise FileNotFoundError("this user has no home")
        user_folder().parent.mkdir(parents=True, exist_ok=True)
        for path in (*reversed(folder.parents), folder):
            if path.is_relative_to(user_folder()):
                path.mkdir(mode=0o700, exist_ok=True)
                path.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"There is no folder for keys and passwords: {error}. Set XDG_CONFIG_HOME to a folder of yours, or "
            "DPO_SIGNING_KEY to a key (docs/access.md)."
        ) from None
