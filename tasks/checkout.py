"""Which checkout and which run this process works for, and the environment that tells its child processes.

DPO_HOME names the main checkout, which holds state that outlives a run's worktree; without it, that is the current
folder. DPO_RUN names the run. Nothing writes either variable into the environment of its own process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOME, RUN = "DPO_HOME", "DPO_RUN"
_kept: Path | None = None


def main_checkout() -> Path:
    """The main checkout; a run in its own worktree finds it, too."""
    return _kept or Path(os.environ.get(HOME, ".")).resolve()


def this_run() -> str:
    """The name of the run that this process belongs to; empty if somebody runs a stage by hand."""
    return os.environ.get(RUN, "")


@contextmanager
def kept_checkout(root: Path | None = None) -> Iterator[None]:
    """Until the block ends, `root` is the main checkout, by default the present one: the current folder may change."""
    global _kept
    before, _kept = _kept, root or main_checkout()
    try:
        yield
    finally:
        _kept = before


def child_environment(run: str = "", checkout: Path | None = None, **changes: str) -> dict[str, str]:
    """Our environment for a child process, which works for our checkout and, by default, for our run."""
    own = {HOME: str(checkout or main_checkout()), **({RUN: run} if run else {})}
    return {**os.environ, **own, **changes}
