"""What a configured path may lead to: every path that parameters name passes through `local_path`.

Data, models, adapters and checkpoints come from others. A link in them, or an address, must not make a run copy what is
the operator's (tasks/secrets/private.py).
"""

import configparser
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tasks.config.paths import ROOT, main_checkout
from tasks.errors import UserError
from tasks.secrets.private import Private

FILE = "file://"
CACHED_BY_DVC = re.compile(r"files/md5/[0-9a-f]{2}/[0-9a-f]{30}")  # named by its content


def local_path(address: str) -> Path:
    """A path of the user: from a worktree, a path that is not there is looked up in the main checkout."""
    path = as_path(address)
    return permitted(path if path.exists() else main_checkout() / path)


def as_path(address: str) -> Path:
    """The path that an address stands for, to see whether anything is there. What is read goes through `local_path`."""
    return Path(address.removeprefix(FILE)).expanduser()


def permitted(path: Path) -> Path:
    """The path itself; UserError if it, or what lies in the folder, leads to a private place or out of the folder."""
    private = Private((main_checkout(), ROOT))
    _refuse(path, private.contains(path))
    if path.is_dir():
        folder = _real(path)
        for entry in _entries(path):
            with suppress(FileNotFoundError):  # somebody deleted it meanwhile
                _check_entry(entry, folder, private)
    return path


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What lies in the folder and those below it, also in hidden ones, without following links; nothing of a folder
    that cannot be read."""
    with suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry))


def _check_entry(entry: os.DirEntry[str], folder: Path, private: Private) -> None:
    if not entry.is_symlink():
        _refuse(entry, private.same_as(entry.stat(follow_symlinks=False)))
    else:
        path, target = Path(entry), _real(Path(entry))
        if not target.is_relative_to(folder) and not _is_in_a_cache(target, folder):
            raise UserError(
                f"{path} is a symbolic link to {target}, outside the folder {folder}. Copy the file into the folder, "
                "or use its own address."
            )
        _refuse(path, private.contains(path))


def _refuse(path: os.PathLike[str], place: Path | None) -> None:
    if place:
        raise UserError(
            f"{os.fspath(path)} leads to {place}, where keys, passwords or tools' own files are. Name another file or "
            "folder: data and models cannot be in a hidden folder of the checkout."
        )


def _is_in_a_cache(target: Path, folder: Path) -> bool:
    """Whether a link leads to where DVC or the hub's library keep the contents of the files of this folder."""
    if any(CACHED_BY_DVC.fullmatch(_below(target, cache)) for cache in _dvc_caches()):
        return True
    snapshots = next((above for above in folder.parents if above.name == "snapshots"), None)
    return snapshots is not None and target.parent == snapshots.parent / "blobs"


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `resolve` raises an error of its own for a loop of links


def _below(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else ""


def _dvc_caches() -> Iterator[Path]:
    """DVC's cache of this checkout. With `cache.type: symlink`, a tracked file is a link into it."""
    for root in {main_checkout(), ROOT}:
        config = configparser.ConfigParser(interpolation=None, strict=False)
        config.read([root / ".dvc" / "config", root / ".dvc" / "config.local"])
        configured = config.get("cache", "dir", fallback="cache")  # relative to the file
        yield (root / ".dvc" / configured).resolve()
