"""Environment variables of every process of ours: no telemetry, quiet libraries, no busy-waiting threads.

Importing this module sets those that the user has not set. A Python without the project's packages stops here.
"""

import importlib.util
import os
import shutil
import sys

if importlib.util.find_spec("pydantic") is None:
    sys.exit(
        f"error: this Python ({sys.executable}) has none of the project's packages. "
        "Run `source .venv/bin/activate` and this again; the first `make demo` makes .venv."
    )

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
# At import, because OpenMP, Ray, DeepSpeed and torch read theirs when they are loaded.
for name, value in QUIET.items():
    QUIET[name] = os.environ.setdefault(name, value)
