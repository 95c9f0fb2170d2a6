"""Runs a stage as a command: environment, workspace lock, tracking run, and error messages.

A stage is `tasks/<stage>.py` with a function of that name that takes its tracking run; `python -m tasks.<stage>`
runs it in the current folder, the root of the workspace.
"""

import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tasks.system.environment  # noqa: F401 - first: it sets variables that the imports below read
from tasks import redact
from tasks.config import access
from tasks.config.params import load_cluster, load_params
from tasks.errors import UserError
from tasks.system import disk
from tasks.system.lock import workspace_lock
from tasks.system.processes import die_with_parent
from tasks.tracking.pipeline_run import tracked
from tasks.trainer import disk_space


def main(stage: Callable[[Any], None]) -> None:
    """Run a stage as a command, with the workspace locked and an MLflow run."""
    run_command(lambda: _run(stage))


def run_command(work: Callable[[], None]) -> None:
    """Exit codes: 0 success, 2 an error that the user can correct, 1 a bug."""
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)
    die_with_parent()
    sys.excepthook = redact.hook
    threading.excepthook = lambda caught: redact.hook(caught.exc_type, caught.exc_value, caught.exc_traceback)
    try:
        work()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        message = str(error) if isinstance(error, UserError) else disk.explain(error) or _missing_input(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)  # no retry: it would find the same mistake or the same full disk


def _missing_input(error: Exception) -> str | None:
    """The message for a stage that was called before the stages that write its inputs."""
    if not isinstance(error, FileNotFoundError) or not str(error.filename).startswith("data/"):
        return None
    return (
        f"{error.filename} is missing: an earlier stage writes it. Run the stages in order, as `dpo run` and `dvc "
        "repro` do: source, sample, prepare, sft, reference, train, evaluate, export."
    )


def _run(stage: Callable[[Any], None]) -> None:
    name, began = stage.__name__, time.monotonic()
    params, cluster = load_params(), load_cluster()
    access.check(params)
    disk_space.check(name, params, cluster)
    with workspace_lock(Path()), tracked(name, params, cluster) as run:
        stage(run)
        run.write("memory", gib=_peak_memory())  # for `dpo plan`; MLflow measures its own
    print(f"{name}: done in {time.monotonic() - began:.1f} s", flush=True)


def _peak_memory() -> float:
    """GiB of the largest process of this stage, finished workers included."""
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    kilobytes = max(resource.getrusage(process).ru_maxrss for process in processes)
    return round(kilobytes / (2**20 if sys.platform == "linux" else 2**30), 2)  # macOS counts bytes
