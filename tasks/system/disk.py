"""File systems: which one a path is on, how much is free, and a full or failing disk as one clear sentence.

`explain` recognises the errors of a full or failing disk in whatever exception a library wraps them (OSError, SQLite's,
pyarrow's, safetensors', Ray's).
"""

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from tasks.config.cluster import load_cluster
from tasks.config.paths import main_checkout
from tasks.errors import UserError

FULL = re.compile(r"No space left on device|Disk quota exceeded|disk is full|\(os error 28\)")
BROKEN = re.compile(r"Input/output error|disk I/O error|Read-only file system|\(os error 5\)")
MINIMUM_FREE = 8 * 2**20  # bytes for journals, locks and MLflow's store, whatever a stage itself writes
ADVICE = (
    "Free some space there (`dpo gc` lists what old runs hold) or move output_dir in infra/cluster.yaml, then run the "
    "same command again: it continues where it stopped."
)


def require(stage: str, sizes: list[tuple[Path, float]]) -> None:
    """UserError unless (folder, bytes) of `sizes` fit; the folders may lie on several file systems."""
    needed: dict[Path, float] = {}
    for folder, size in sizes:
        mount = mount_of(folder)
        needed[mount] = needed.get(mount, MINIMUM_FREE) + size
    for mount, size in needed.items():
        free = shutil.disk_usage(mount).free
        if free < size:
            raise UserError(
                f"{stage} needs about {human(size)} on the file system {mount}, and {human(free)} are free. {ADVICE}"
            )


def explain(error: BaseException, folder: Path | None = None) -> str | None:
    """The sentence for an error that a full or failing disk caused; None for any other error."""
    for cause in _causes(error):
        number, message = getattr(cause, "errno", None), str(cause)
        name = getattr(cause, "filename2", None) or getattr(cause, "filename", None)
        path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else folder
        if number in (errno.ENOSPC, errno.EDQUOT) or FULL.search(message):
            return explain_full(path)
        if "PytorchStreamWriter failed" in message and is_full(path):  # torch does not say why
            return explain_full(path)
        if number in (errno.EIO, errno.EROFS) or BROKEN.search(message):
            return _explain_broken(path, os.strerror(number) if number else message.splitlines()[0])
    return None


def explain_full(path: Path | None = None) -> str:
    """`path` could not be written; where it is unknown, the sentence names the fullest file system that we use."""
    mount = mount_of(path) if path else _fullest()
    size, state = shutil.disk_usage(mount), os.statvfs(mount)
    subject = f"{path} could not be written: the" if path else "The"
    free = f"{human(size.free)} of {human(size.total)} are free"
    if state.f_files and not state.f_favail:
        free += ", and it has no inode left for another file"
    return f"{subject} file system {mount} is full ({free}). {ADVICE}"


def is_full(path: Path | None = None) -> bool:
    """Whether the file system of `path`, or the fullest that we use, has practically no space left."""
    return shutil.disk_usage(mount_of(path) if path else _fullest()).free < MINIMUM_FREE


def _explain_broken(path: Path | None, reason: str) -> str:
    subject = f"{path}, on the file system {mount_of(path)}," if path else f"A file of the run in {Path.cwd()}"
    return (
        f"{subject} could not be written: {reason}. Check the disk (`dmesg`, or your storage's log). Once it works, "
        "run the same command again: it continues where it stopped."
    )


def _causes(error: BaseException) -> list[BaseException]:
    """The exception and those behind it, Ray's `cause` included."""
    causes = [error]
    for cause in causes:  # the list grows meanwhile
        for behind in (cause.__cause__, cause.__context__, getattr(cause, "cause", None)):
            if isinstance(behind, BaseException) and not any(behind is known for known in causes):
                causes.append(behind)
    return causes


def _fullest() -> Path:
    folders = [Path(), main_checkout(), Path(os.environ.get("TMPDIR", "/tmp"))]
    with suppress(UserError):
        folders.append(main_checkout() / load_cluster().output_dir)
    return min({mount_of(folder) for folder in folders}, key=lambda mount: shutil.disk_usage(mount).free)


def mount_of(path: Path) -> Path:
    """The mount point of the file system that a path is, or will be, on."""
    path = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()).resolve()
    device = path.stat().st_dev
    while path != path.parent and path.parent.stat().st_dev == device:
        path = path.parent
    return path


def human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 where there is nothing."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
