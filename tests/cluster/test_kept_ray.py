"""One embedded Ray cluster for the stages of a flow: who connects to it, and that it never outlives the flow."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tasks.cluster import embedded_ray, kept_ray
from tasks.config.cluster import load_cluster
from tasks.system import processes
from tasks.system.environment import QUIET
from tasks.system.files import read_json_or_empty, write_json
from tests.support.workspaces import wait_for

PROJECT = Path(__file__).resolve().parents[2]
STAGES = ("watch", "source", "sample", "prepare", "sft", "reference", "train", "evaluate", "export")
FLOW = """
import os, sys
from pathlib import Path
from tasks.cluster import kept_ray
with kept_ray.keep(Path.cwd(), os.environ) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""
STAGE = """
import os
from tasks.cluster.ray_cluster import ray_cluster
from tasks.config.cluster import load_cluster
with ray_cluster(load_cluster().ray, 3) as folder:
    import ray
    worker = ray.get(ray.remote(num_cpus=3)(lambda: (os.getpid(), os.getcwd())).remote())
    print(folder, *worker)
"""


def test_a_cluster_is_kept_if_a_stage_that_will_run_needs_one():
    def needed(*stale: str, **changes: object) -> bool:
        return kept_ray.is_needed(load_cluster(PROJECT, changes), stale, STAGES)

    assert needed("source")  # reference and train follow
    assert needed("train")
    assert not needed()
    assert not needed("evaluate", "export")
    assert needed("evaluate", inference={"num_workers": 2})
    assert not needed("source", ray={"address": "10.0.0.1:6379"})


def test_a_kept_cluster_has_room_for_each_worker_group():
    groups = {"reference": {"num_workers": 4}, "actor_train": {"num_workers": 2, "cpus_per_worker": 2}}
    assert kept_ray.cpus_needed(load_cluster(PROJECT, groups)) == 5  # 2 x 2 and Ray Train's controller


def test_a_stage_connects_only_to_a_living_cluster_that_suits(tmp_path, monkeypatch):
    environment = embedded_ray.worker_environment(load_cluster(PROJECT).ray)
    assert kept_ray.find(1, environment) is None
    monkeypatch.setenv(kept_ray.SESSION, str(tmp_path))
    assert kept_ray.find(1, environment) is None  # its folder is gone
    write_json(tmp_path / kept_ray.HOLDER, processes.this_process())
    inherited = {**environment, "PYTHONPATH": embedded_ray.python_path()}
    kept = {"address": "127.0.0.1:1", "token": "secret", "cpus": 2, "environment": inherited}
    kept["servers"] = [processes.this_process()]
    write_json(tmp_path / kept_ray.ADDRESS, kept)
    assert kept_ray.find(2, environment) == (tmp_path, "127.0.0.1:1", "secret")
    with monkeypatch.context() as changed:
        changed.setenv("TOKENIZERS_PARALLELISM", "false")  # as `sample` and `prepare` do
        own = embedded_ray.worker_environment(load_cluster(PROJECT).ray)
        assert kept_ray.find(2, own) == (tmp_path, "127.0.0.1:1", "secret")
    assert kept_ray.find(3, environment) is None
    assert kept_ray.find(2, {**environment, "NCCL_DEBUG": "INFO"}) is None  # of ray.env in infra/cluster.yaml
    with monkeypatch.context() as other:
        other.setenv("PYTHONPATH", "elsewhere")
        assert kept_ray.find(2, environment) is None
    ended = {**processes.this_process(), "began": 0}
    write_json(tmp_path / kept_ray.ADDRESS, {**kept, "servers": [processes.this_process(), ended]})
    assert kept_ray.find(2, environment) is None
    write_json(tmp_path / kept_ray.ADDRESS, kept)
    write_json(tmp_path / kept_ray.HOLDER, ended)
    assert kept_ray.find(2, environment) is None


def environment(**more: str) -> dict[str, str]:
    # With what is on the path: Ray's own processes are forked (tests/support/fork_server.py).
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **QUIET, "PYTHONPATH": path, **more}  # QUIET, which another test's stage may have changed


@contextmanager
def flow() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that keeps a cluster, and the cluster's session folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", FLOW],
        cwd=PROJECT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def stage(session: Path) -> tuple[Path, psutil.Process | None, str]:
    """Run a stage: its cluster's session folder, its worker if that still runs, and the worker's folder."""
    env = environment(**{kept_ray.SESSION: str(session)})
    done = subprocess.run(
        [sys.executable, "-c", STAGE], cwd=PROJECT, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    folder, pid, cwd = done.stdout.split()[-3:]
    return Path(folder), psutil.Process(int(pid)) if psutil.pid_exists(int(pid)) else None, cwd


def of_session(session: Path) -> list[psutil.Process]:
    """Ray's processes: their command lines or environments name the session."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        names = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
        if any(str(session) in name for name in names) and process.pid != os.getpid():
            found.append(process)
    return found


def raylet_of(session: Path) -> psutil.Process:
    (raylet,) = [process for process in of_session(session) if process.name() == "raylet"]
    return raylet


@pytest.mark.slow
def test_stages_of_a_flow_share_a_cluster_that_no_other_flow_uses_and_that_ends_with_the_flow(monkeypatch):
    """One flow ends, the other is killed."""
    with flow() as (ends, first), flow() as (killed, second):
        for _ in range(2):  # the second needs the CPUs of the first's worker
            folder, worker, cwd = stage(first)
            assert (folder, cwd) == (first, str(PROJECT))
            wait_for(lambda worker=worker: worker is None or not processes.is_running(worker), 10)
        for session in (first, second):
            wait_for((session / kept_ray.ADDRESS).exists, 120)
            assert {"gcs_server", "raylet"} <= {process.name() for process in of_session(session)}
        assert len({read_json_or_empty(session / kept_ray.ADDRESS)["address"] for session in (first, second)}) == 2
        monkeypatch.setenv(kept_ray.SESSION, str(second))
        monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        inherited = embedded_ray.worker_environment(load_cluster(PROJECT).ray)
        assert kept_ray.find(3, inherited)
        raylet_of(second).kill()
        wait_for(lambda: kept_ray.find(3, inherited) is None, 10)  # a stage would start a cluster
        killed.kill()
        ends.communicate("")
        assert not of_session(first)
        assert not first.exists()
        wait_for(lambda: not of_session(second), 30)
        with embedded_ray.private_session():  # the next start deletes the folder of a killed one
            assert not second.exists()


@pytest.mark.slow
@pytest.mark.exhaustive  # the test before this one loses a cluster, too; here a stage starts another
def test_a_stage_whose_flow_has_lost_its_cluster_starts_one():
    with flow() as (process, session):
        wait_for((session / kept_ray.ADDRESS).exists, 120)
        raylet_of(session).kill()
        assert stage(session)[0] != session
        process.communicate("")
