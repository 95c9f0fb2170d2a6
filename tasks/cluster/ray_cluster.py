"""The Ray cluster: an embedded one on this machine, or the one at `ray.address`.

Ray reads its authentication settings when it is imported, so import it only inside a `ray_cluster` block.
"""

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tasks.cluster import embedded_ray, kept_ray
from tasks.config.cluster import Ray
from tasks.errors import UserError

HEAD_TIMEOUT = 5.0  # seconds for a head to accept a connection
HOW_TO_JOIN = (
    "A driver runs on a node: `ray start --address HEAD:PORT --num-cpus 0` makes this machine one that takes no work."
)


@contextmanager
def ray_cluster(config: Ray, cpus: float) -> Iterator[Path | None]:
    """Connect to the cluster for the time of the block. An embedded cluster has at least `cpus` CPUs.

    Yields the private session folder of an embedded cluster, None for any other.
    """
    if config.address == "local":
        with _embedded(cpus, embedded_ray.worker_environment(config)) as session:
            yield session
    else:
        with _connected(config.address, embedded_ray.worker_environment(config, config.interface)):
            yield None


@contextmanager
def _embedded(cpus: float, environment: Mapping[str, str]) -> Iterator[Path]:
    """The cluster that the flow keeps for its stages, or one of our own."""
    kept = kept_ray.find(cpus, environment)
    embedded_ray.set_environment(environment, kept.token if kept else None)
    import ray

    session = nullcontext(kept.folder) if kept and kept_ray.connect(kept) else embedded_ray.started(cpus)
    with session as folder:
        try:
            yield folder
        finally:
            ray.shutdown()


@contextmanager
def _connected(address: str, environment: dict[str, str]) -> Iterator[None]:
    """Ray sends our code to the nodes. Data is on shared storage (tasks/cluster/nodes.py)."""
    _require_token()
    if address != "auto":
        _check_head(address)
    # By default Ray tries a head that rejects the token twenty times, and logs a line for each.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "4")
    import ray

    environment.pop("DS_ACCELERATOR", None)  # each node detects its own GPUs
    packages = [str(embedded_ray.CODE / name) for name in ("tasks", "training")]
    runtime_env = {"py_modules": packages, "excludes": ["__pycache__"], "env_vars": environment}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, runtime_env=runtime_env)
    except ConnectionError as error:
        if address == "auto":
            raise UserError(f"ray.address is auto, but this machine is not a Ray node. {HOW_TO_JOIN}") from error
        raise UserError(
            f"The Ray head at {address} (ray.address in infra/cluster.yaml) does not accept our token. Set "
            "RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a file with it; `ray get-auth-token` on "
            "the head prints it."
        ) from error
    except RuntimeError as error:
        raise UserError(_explain_refusal(address, error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_token() -> None:
    if os.environ.setdefault("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    if not path.is_file() or not path.read_text().strip():
        raise UserError(
            f"No token for the Ray cluster: RAY_AUTH_TOKEN is not set and {path} is missing or empty. Copy the head's "
            "token (`ray get-auth-token` prints it there) into RAY_AUTH_TOKEN, or into a file named by "
            "RAY_AUTH_TOKEN_PATH."
        )


def _check_head(address: str) -> None:
    """Fail within seconds: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=HEAD_TIMEOUT).close()
    except OSError as error:
        raise UserError(
            f"No Ray head answers at {address}, ray.address in infra/cluster.yaml ({error}). Start one there with "
            f"`ray start --head --port {port}`, correct the address, or set it to local."
        ) from error


def _explain_refusal(address: str, error: Exception) -> str:
    message = " ".join(str(error).split())
    if "ersion" in message:  # Ray names the versions of both sides
        return (
            f"Ray or Python differ between the head at {address} and this machine: {message} Install the same on both."
        )
    return f"This machine is not a node of the Ray cluster at {address} ({message}). {HOW_TO_JOIN}"


def warn_of_slow_dtype(stage: str, dtype: str, gpus: float) -> None:
    if gpus or dtype == "float32":
        return
    from training.models.dtypes import is_slow_on_cpu  # loads torch, which a driver does not need otherwise

    if is_slow_on_cpu(dtype):
        print(f"warning: this CPU has no {dtype} instructions: slow. Set {stage}.dtype to float32.", flush=True)
