"""A checkout with a worker on the tests' Prefect server (fixture `prefect_api`), and requests to that server."""

import base64
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.system import processes

Env = dict[str, str]


def ask(env: Env, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    login = base64.b64encode(env["PREFECT_API_AUTH_STRING"].encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
    return json.load(urllib.request.urlopen(urllib.request.Request(f"{env['PREFECT_API_URL']}/{path}", data, headers)))


@contextmanager
def worker(root: Path, env: Env) -> Iterator[None]:
    """Create the pool, deploy infra/prefect.yaml and start a worker in that checkout, as infra/worker.sh does."""
    subprocess.run([sys.executable, "-m", "services.provision"], cwd=root, env=env, check=True, timeout=900)
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "dpo"]
    with (root.parent / "worker.log").open("w") as log, processes.spawn(command, root, env, log):
        yield


def newest_table(env: Env) -> dict[str, str]:
    found = ask(env, "artifacts/filter", {"sort": "CREATED_DESC", "artifacts": {"key": {"any_": ["dpo-stages"]}}})
    return {row["stage"]: row["state"] for row in json.loads(found[0]["data"])}
