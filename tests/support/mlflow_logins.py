"""MLflow's server with logins, as `dpo up` starts it, on a free loopback port."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.health import is_healthy
from tasks.system import processes
from tasks.system.ports import free_port
from tasks.tracking.mlflow_server import USERS
from tests.support.workspaces import PROJECT, wait_for

PASSWORDS = {user: f"{user}-password-1" for user in USERS}
VARIABLES = {f"DPO_MLFLOW_{user.upper()}_PASSWORD": password for user, password in PASSWORDS.items()}


@contextmanager
def mlflow_with_logins(folder: Path, store: Path, **more: str) -> Iterator[str]:
    """Its address. `more` are variables of its environment."""
    shutil.copytree(store, folder / "store")
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "tasks.tracking.mlflow_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/store/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "store" / "artifacts")]
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **VARIABLES, "PYTHONPATH": path, "DPO_MLFLOW_USERS": f"sqlite:///{folder}/users.db"}
    env |= {"FORK_STAGES": "1", "MLFLOW_DISABLE_TELEMETRY": "true", **more}
    with (folder / "server.log").open("w") as log, processes.spawn(command, folder, env, log) as process:
        wait_for(lambda: is_healthy(f"{address}/health") or process.poll() is not None, 300)
        assert process.poll() is None, (folder / "server.log").read_text()
        yield address
