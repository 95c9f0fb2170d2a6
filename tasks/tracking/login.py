"""Which user of an MLflow server a process of ours is (tasks/tracking/server.py says what each may do)."""

import json
import os
from contextlib import suppress
from pathlib import Path

from tasks.files import home


def use(uri: str, user: str) -> None:
    """Log in as `user` where its password is known; otherwise MLFLOW_TRACKING_USERNAME and _PASSWORD stay as they are.

    The password comes from DPO_MLFLOW_<USER>_PASSWORD, or from `make up` of this checkout where the server is its own.
    """
    password = os.environ.get(f"DPO_MLFLOW_{user.upper()}_PASSWORD") or _of_make_up(uri, user)
    if uri.startswith("http") and password:
        os.environ |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


def _of_make_up(uri: str, user: str) -> str | None:
    folder: Path = home() / ".services"
    with suppress(FileNotFoundError, KeyError, json.JSONDecodeError):
        if json.loads((folder / "mlflow.json").read_text())["address"] == uri.rstrip("/"):
            return str(json.loads((folder / "passwords.json").read_text())[f"mlflow/{user}"])
    return None
