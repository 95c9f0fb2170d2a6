"""How our processes reach MLflow: the store's address, limits on waiting, the login, and requests sent only once.

mlflow_server.py lists the users and what each may do.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.config.paths import main_checkout
from tasks.system.keyring import private_file

CONFIGURATION, ERROR = "configuration.yaml", "upload.error"  # files in a run's folder
SQLITE = "sqlite:///"
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
# A store that is down costs seconds per call; MLflow's own defaults are minutes.
LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    RETRIES: "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0.5",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def limit_waiting(**more: str) -> None:
    """Before mlflow is imported. What the user has set stays."""
    for name, value in {**LIMITS, **more}.items():
        os.environ.setdefault(name, value)


def database(uri: str) -> Path | None:
    """The SQLite file of a store without a server. Its path is relative to the main checkout, not to a worktree."""
    path = uri.removeprefix(SQLITE)
    return None if path == uri else main_checkout() / path


def absolute_uri(uri: str) -> str:
    file = database(uri)
    return f"{SQLITE}{file}" if file else uri


def log_in(uri: str, user: str) -> None:
    """Log in as `user` where its password is known; otherwise MLFLOW_TRACKING_USERNAME and _PASSWORD stay as they are.

    The password comes from DPO_MLFLOW_<USER>_PASSWORD, or from this checkout's `dpo up` if it started the server.
    """
    password = os.environ.get(f"DPO_MLFLOW_{user.upper()}_PASSWORD") or _password_of_dpo_up(uri, user)
    if uri.startswith("http") and password:
        os.environ |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


def _password_of_dpo_up(uri: str, user: str) -> str | None:
    with suppress(FileNotFoundError, KeyError, json.JSONDecodeError):
        if json.loads((main_checkout() / ".services" / "mlflow.json").read_text())["address"] == uri.rstrip("/"):
            return str(json.loads(private_file("passwords.json", main_checkout()).read_text())[f"mlflow/{user}"])
    return None


@contextmanager
def without_retries() -> Iterator[None]:
    """MLflow's client repeats a request whose answer was lost; one that creates something would create it twice."""
    before = os.environ.get(RETRIES)
    os.environ[RETRIES] = "0"
    try:
        yield
    finally:
        del os.environ[RETRIES]
        if before is not None:
            os.environ[RETRIES] = before
