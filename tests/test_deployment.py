"""infra/prefect.yaml on a real Prefect server with a real worker: the deployed values, and a cancelled run.

Prefect drops a key that it does not know without a word, so what was deployed is read back.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows import child
from tests.workspaces import wait_for

pytestmark = pytest.mark.slow
Env = dict[str, str]


def prefect(root: Path, env: Env, *arguments: str, timeout: float = 300) -> str:
    command = [sys.executable, "-m", "prefect", *arguments]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask(env: Env, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{env['PREFECT_API_URL']}/{path}", data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, prefect_api: Env, mlflow_store: Path) -> Iterator[Path]:
    """A checkout whose deployments are on the server, with a worker at work in it."""
    from tests.conftest import make_dummy_repo

    root = make_dummy_repo(tmp_path_factory.mktemp("deployed") / "repo", mlflow_store)
    with worker(root, prefect_api):
        yield root


@contextmanager
def worker(root: Path, env: Env) -> Iterator[None]:
    """Deploy what infra/prefect.yaml holds, and work for it in that checkout."""
    prefect(root, env, "work-pool", "create", "--type", "process", "--overwrite", "dpo")
    prefect(root, env, "--no-prompt", "deploy", "--all", "--prefect-file", "infra/prefect.yaml")
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "dpo"]
    with (root.parent / "worker.log").open("w") as log, child.started(command, root, env, log) as process:
        (root.parent / "worker.pid").write_text(str(process.pid))
        yield


def newest_table(env: Env) -> dict[str, str]:
    found = ask(env, "artifacts/filter", {"sort": "CREATED_DESC", "artifacts": {"key": {"any_": ["dpo-stages"]}}})
    return {row["stage"]: row["state"] for row in json.loads(found[0]["data"])}


@pytest.mark.parametrize("name", ["full", "smoke"])
def test_what_is_deployed_is_what_the_file_says(deployed: Path, prefect_api: Env, name: str) -> None:
    deployment = ask(prefect_api, f"deployments/name/dpo/{name}")
    assert deployment["entrypoint"] == "flows.dpo.dpo"
    assert deployment["work_pool_name"] == "dpo"
    assert deployment["global_concurrency_limit"]["limit"] == 1
    assert deployment["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert deployment["job_variables"] == {"working_dir": ".", "stream_output": True}
    assert "dpo" in deployment["tags"]
    assert deployment["description"]
    assert str(deployed) not in json.dumps(deployment)  # no path of the machine that deployed it
    assert (deployment["parameters"] == {}) == (name == "full")
    assert set(deployment["parameter_openapi_schema"]["properties"]) >= {"recipe", "overrides", "name", "resume"}


def test_the_overrides_of_smoke_are_good(prefect_api: Env, deployed: Path) -> None:
    from flows.workspace import plan

    parameters = ask(prefect_api, "deployments/name/dpo/smoke")["parameters"]
    assert list(plan(None, parameters["overrides"])) == ["params.yaml"]


def test_a_cancelled_run_ends_with_all_its_processes(deployed: Path, prefect_api: Env) -> None:
    run, family = hanging(deployed, prefect_api, "cancelled")
    assert (deployed / ".scratch/worktrees/cancelled/data/source").exists()  # a worktree of its own
    assert not (deployed / "data").exists()
    ask(prefect_api, f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})  # as the button does
    wait_for(lambda: not any(map(runs, family)), 30)
    wait_for(lambda: ask(prefect_api, f"flow_runs/{run}")["state_type"] == "CANCELLED", 60)
    assert json.loads((deployed / ".scratch/runs/cancelled/record.json").read_text())["state"] == "stopped"


def test_nothing_outlives_a_killed_worker(deployed: Path, prefect_api: Env) -> None:
    """The last test here: there is no worker afterwards."""
    _, family = hanging(deployed, prefect_api, "orphaned")
    os.kill(int((deployed.parent / "worker.pid").read_text()), signal.SIGKILL)
    wait_for(lambda: not any(map(runs, family)), 60)


def hanging(root: Path, env: Env, name: str) -> tuple[str, list[int]]:
    """A run of dpo/full whose train stage hangs, with processes in sessions of their own; its id and their pids."""
    pids = root / ".scratch" / "pids"
    pids.unlink(missing_ok=True)
    deployment = ask(env, "deployments/name/dpo/full")["id"]
    asked = {"parameters": {"name": name}, "job_variables": {"env": {"DUMMY": "train:sessions"}}}
    run = ask(env, f"deployments/{deployment}/create_flow_run", asked)
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 3, 120)
    return run["id"], list(map(int, pids.read_text().split()))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
