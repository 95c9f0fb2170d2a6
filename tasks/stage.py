"""What every stage is wrapped in: the environment, the lock, tracking, and errors that are sentences.

A stage is `tasks/<stage>.py` with a function of that name that takes its tracking run; `python -m tasks.<stage>`
runs it in the current folder, which is the root of the workspace.
"""

import ctypes
import importlib.util
import os
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks import redact
from tasks.errors import UserError

if importlib.util.find_spec("pydantic") is None:
    sys.exit(
        f"error: this Python ({sys.executable}) has none of the project's packages. "
        "Run `source .venv/bin/activate` and this again; the first `make demo` makes .venv."
    )

# No telemetry, no chatter, no spinning threads; what the user has set stays.
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_ALLOW_MODEL_CODE_EXECUTION": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "DEEPSPEED_LOG_LEVEL": "error",
    "DS_LOG_LEVEL": "error",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # otherwise two seconds a report
    "OMP_WAIT_POLICY": "PASSIVE",  # two processes on two cores slow each other a hundredfold otherwise
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning,ignore::UserWarning",
    "PYTHONUNBUFFERED": "1",
    "DS_ACCELERATOR": "cuda" if shutil.which("nvidia-smi") else "cpu",
}
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
    # Rows differ in length: without segments that grow, the CUDA allocator reserves several times what is in use.
    QUIET["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
# At import and not in main: OpenMP, Ray, DeepSpeed and torch read theirs when they are loaded.
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)


def main(stage: Callable[[Any], None]) -> None:
    """Run a stage as a command, with the workspace locked and a run in MLflow."""
    command(lambda: _run(stage))


def command(work: Callable[[], None]) -> None:
    """Exit codes: 0 done, 2 something that the user can mend, 1 a fault of ours."""
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)
    die_with_parent()
    sys.excepthook = redact.hook
    threading.excepthook = lambda given: redact.hook(given.exc_type, given.exc_value, given.exc_traceback)
    try:
        work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        from tasks import disk

        sentence = disk.explain(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        sys.exit(2)  # not tried again: the next try would find the same disk


def _run(stage: Callable[[Any], None]) -> None:
    from tasks import access, disk
    from tasks.machines.lock import workspace_lock
    from tasks.params import load_cluster, load_params
    from tasks.tracking.journal import tracked

    name, began = stage.__name__, time.monotonic()
    params, cluster = load_params(), load_cluster()
    access.check(params)
    disk.check(name, params, cluster)
    with workspace_lock(Path()), tracked(name, params, cluster) as run:
        stage(run)
        run.write("memory", gib=_peak())  # for `make plan`; MLflow has its own
    print(f"{name}: done in {time.monotonic() - began:.1f} s", flush=True)


def _peak() -> float:
    """GiB of the largest process of this stage, workers that have ended included."""
    kilobytes = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(kilobytes / (2**20 if sys.platform == "linux" else 2**30), 2)  # macOS counts bytes


def die_with_parent() -> None:
    """DVC leaves a stage's command running when it is killed; the kernel does not (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
