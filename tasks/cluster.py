"""The Ray cluster: an embedded one on this machine, or the one whose address is configured.

Ray reads its authentication settings when it is imported, so nobody imports it before `ray_cluster` has begun.
"""

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import UserError
from tasks.stage import QUIET
from training.dtypes import slow_here


@contextmanager
def ray_cluster(address: str, cpus: float) -> Iterator[None]:
    """Connect, and leave nothing behind. `cpus` is what an embedded cluster is made with."""
    environment = {**QUIET, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    if address == "local":  # inherited by the embedded cluster: cheaper than an environment of Ray's making
        os.environ.update(environment, RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0")
    if address != "local":
        with _connected(address, environment):
            yield
        return
    # A token of its own, so that nothing is written into the home folder and no other Ray is reached.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray

    folder = tempfile.mkdtemp(prefix="dpo-ray-")  # short: Ray's socket names have a length limit
    try:
        ray.init(
            address="local",
            num_cpus=int(-(-cpus // 1)),
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,  # our workers report through files; Ray's own chatter stays in its logs
            _temp_dir=folder,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _connected(address: str, environment: dict[str, str]) -> Iterator[None]:
    import ray

    del environment["PYTHONPATH"]  # the working directory travels to the nodes
    excludes = ["data", ".git", ".dvc", ".venv", ".scratch", ".mlflow", ".prefect"]
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            runtime_env={"working_dir": ".", "excludes": excludes, "env_vars": environment},
        )
    except ConnectionError as error:
        raise UserError(
            f"ray.address in infra/cluster.yaml: no Ray cluster answers at {address} ({error}). "
            "Start one with `ray start --head`, or set it to local."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def warn_of_slow_dtype(stage: str, dtype: str, gpus: float) -> None:
    if not gpus and slow_here(dtype):
        print(f"warning: this CPU has no {dtype} and is very slow with it. Set {stage}.dtype to float32.", flush=True)
