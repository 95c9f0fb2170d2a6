"""Runs a stage as a command: environment, workspace lock, tracking run, and error messages.

`python -m tasks STAGE` runs it in the current folder, the root of the workspace. The code of a stage is in the folder
of its name; `stage.py` there has a function of that name, which takes the tracking run.
"""

import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import tasks.system.environment  # noqa: F401 - first: it sets variables that the imports below read
from tasks import disk_space
from tasks.config import access
from tasks.config.cluster import load_cluster
from tasks.config.params import PARAMS, load_params
from tasks.config.strict import read_yaml
from tasks.errors import UserError
from tasks.runs.dvc_lock import is_disabled
from tasks.secrets import redact
from tasks.system import disk
from tasks.system.lock import workspace_lock
from tasks.system.processes import die_with_parent
from tasks.tracking.pipeline_run import record_stage

STAGES = {  # in the order of dvc.yaml; two live in the folder of the stage that they serve
    "fingerprint": "tasks.source.fingerprint",
    "source": "tasks.source.stage",
    "sample": "tasks.sample.stage",
    "prepare": "tasks.prepare.stage",
    "sft": "tasks.train.sft",
    "reference": "tasks.reference.stage",
    "train": "tasks.train.stage",
    "evaluate": "tasks.evaluate.stage",
    "export": "tasks.export.stage",
    "promote": "tasks.promote.stage",  # not in dvc.yaml: `dpo promote` and the flow run it
}
UNTRACKED = ("fingerprint",)  # it runs before every run, and usually finds nothing


def main(arguments: Sequence[str]) -> None:
    run_command(lambda: _main(arguments))


def _main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in STAGES:
        raise UserError(f"`python -m tasks` takes the name of one stage: {', '.join(STAGES)}.")
    name = arguments[0]
    module = import_module(STAGES[name])
    if name in UNTRACKED:
        module.fingerprint()
    elif is_disabled(name, read_yaml(PARAMS)):
        module.skip()
    else:
        _run(getattr(module, name))


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
    with workspace_lock(Path()), record_stage(name, params, cluster) as run:
        stage(run)
        run.write("memory", gib=_peak_memory())  # for `dpo plan`; MLflow measures its own
    print(f"{name}: done in {time.monotonic() - began:.1f} s", flush=True)


def _peak_memory() -> float:
    """GiB of the largest process of this stage, finished workers included."""
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    kilobytes = max(resource.getrusage(process).ru_maxrss for process in processes)
    return round(kilobytes / (2**20 if sys.platform == "linux" else 2**30), 2)  # macOS counts bytes
