"""Errors in the configuration of a Ray cluster are reported before work starts. Two hosts: test_two_hosts.py."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.cluster import embedded_ray, nodes, ray_cluster
from tasks.config.cluster import load_cluster
from tasks.errors import UserError
from tasks.system.ports import free_port

PROJECT = Path(__file__).resolve().parents[2]


def config_error(content: dict) -> str:
    with pytest.raises(UserError) as error:
        load_cluster(PROJECT, content)
    return str(error.value)


def test_an_address_is_local_auto_or_host_and_port():
    for good in ("local", "auto", "10.0.0.1:6379", "ray-head.dpo.svc:6379"):
        assert load_cluster(PROJECT, {"ray": {"address": good}}).ray.address == good
    message = config_error({"ray": {"address": "ray://10.0.0.1:10001"}})
    assert "it must be `local`, the head node's host:port (10.0.0.1:6379)" in message
    assert "`interface` has no effect on address local" in config_error({"ray": {"interface": "eth0"}})
    assert "ray.env" in config_error({"ray": {"env": {"NCCL_DEBUG": 1}}})


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_missing_token_names_the_places_where_it_is_read(no_token, monkeypatch):
    with pytest.raises(
        UserError, match=f"RAY_AUTH_TOKEN is not set and {no_token}/.ray/auth_token is missing or empty"
    ):
        ray_cluster._require_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(no_token / "token"))
    with pytest.raises(UserError, match=f"{no_token}/token is missing or empty"):
        ray_cluster._require_token()
    (no_token / "token").write_text("abc")
    ray_cluster._require_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_an_unreachable_head_is_reported_at_once():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"No Ray head answers at {address}.*`ray start --head --port"):
        ray_cluster._check_head(address)


def test_a_node_with_other_versions_is_reported_with_both_versions():
    ours = nodes.package_versions()
    theirs = {**ours, "python": "3.9.1", "torch": "2.12.0"}
    (message,) = nodes.version_mismatches({"10.0.0.1": ours, "10.0.0.2": theirs}, ours)
    assert message.startswith(f"Ray node 10.0.0.2 has python 3.9.1 (here: {ours['python']}), torch 2.12.0 (here: ")


def test_files_of_the_same_size_differ_by_their_modification_time(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_text("1")
    before = [nodes.list_files(tmp_path, [Path("data")], times) for times in (True, False)]
    (tmp_path / "data/a").write_text("2")
    os.utime(tmp_path / "data/a", ns=(1, 1))
    after = [nodes.list_files(tmp_path, [Path("data")], times) for times in (True, False)]
    assert before[0] != after[0]
    assert before[1] == after[1] == [("data/a", 1)]


EMBEDDED = """
from pathlib import Path
from tasks.cluster import placement, ray_cluster
from tasks.config import cluster
from tasks.errors import UserError
placement.PLACEMENT_TIMEOUT = 1.0
changes = {"reference": {"placement": "STRICT_SPREAD"}, "actor_train": {"resources": {"trainer": 1}}}
configured = cluster.load_cluster(Path(cluster.__file__).parents[2], changes)
with ray_cluster.ray_cluster(configured.ray, 2):
    try:
        with placement.reserve_placement_group(configured.ray, configured.actor_train, 1):
            print("a trainer fits")
    except UserError as error:
        print(f"refused: {error}")
    with placement.reserve_placement_group(configured.ray, configured.reference, 1):
        print("one fits")
        import ray
        print("worker imports", ray.get(ray.remote(lambda: __import__("only_on_pythonpath").__name__).remote()))
        at_start = ray.remote(lambda: open("/proc/self/environ").read())  # of the process, before it imports torch
        print("worker's environment:", ray.get(at_start.remote()).split(chr(0)))
    with placement.reserve_placement_group(configured.ray, configured.reference, 2):
        print("two fit")
"""


def embedded(folder: Path, packages: Path) -> subprocess.CompletedProcess[str]:
    # With what is on the path: Ray's own processes are forked (tests/support/fork_server.py).
    path = os.pathsep.join([str(PROJECT), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", EMBEDDED], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_group_that_cannot_fit_on_an_embedded_cluster_is_an_error(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "only_on_pythonpath.py").touch()
    done = embedded(tmp_path, tmp_path / "packages")
    assert (
        "refused: infra/cluster.yaml: 1 workers with 1 CPU, 1 trainer each do not fit on 1 nodes with 2 CPU"
        in done.stdout
    )
    assert "No node offers the custom resource trainer, which `resources` of the worker group in" in done.stdout
    assert "or start a node with `ray start --resources '{\"trainer\": 1}'`" in done.stdout
    assert "one fits" in done.stdout
    assert "worker imports only_on_pythonpath" in done.stdout
    # CUDA's allocator reads it once; without it, it reserves three times what rows of many lengths take.
    assert "'PYTORCH_ALLOC_CONF=expandable_segments:True'" in done.stdout
    assert "two fit" not in done.stdout
    assert "2 workers with 1 CPU each do not fit on 1 nodes with 2 CPU in total" in done.stderr


def test_the_error_of_a_ray_that_does_not_start_ends_with_the_log_of_the_agent_that_failed(tmp_path):
    line = "[2026-01-05 10:00:00,000 E 1 1] agent_manager.cc:88: one Ray agent failed, agent_name = dashboard_agent."
    assert embedded_ray.AGENT_FAILED.search(line)[1] == "dashboard_agent"
    assert "failed before it wrote a log" in embedded_ray._agent_failed(tmp_path, "dashboard_agent")
    (tmp_path / "dashboard_agent.log").write_text("first\n    @ (+0x1234) a stack frame\n\nImportError: broken\n")
    message = embedded_ray._agent_failed(tmp_path, "dashboard_agent")
    assert (
        "Ray does not start: its process dashboard_agent failed. Its log ends with:\nfirst\nImportError: broken\n"
        in message
    )


@pytest.mark.slow
@pytest.mark.exhaustive  # the test before this one has the message; Ray takes 30 seconds to give up
def test_a_ray_that_cannot_start_is_reported_with_its_log_and_not_retried(tmp_path):
    """Ray itself says "timed out during startup", after 30 seconds."""
    broken = tmp_path / "packages" / "aiohttp"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('this aiohttp is broken')")
    began = time.monotonic()
    done = embedded(tmp_path, tmp_path / "packages")
    assert "UserError: Ray does not start: its process dashboard_agent failed. Its log ends with:" in done.stderr
    assert "ImportError: this aiohttp is broken" in done.stderr.partition("UserError")[2]
    assert time.monotonic() - began < 90  # three tries take longer


CODE = {**os.environ, "PYTHONPATH": str(PROJECT)}
HOLDER = """
import sys, time
from pathlib import Path
from tasks.cluster.embedded_ray import private_session
with private_session(Path(sys.argv[1])) as folder:
    (folder / "ray").mkdir(mode=0o777)
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_session_is_private_and_the_next_start_deletes_that_of_a_killed_process(tmp_path):
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=CODE)
        for _ in range(2)
    ]
    try:
        live, killed = (Path(holder.stdout.readline().strip()) for holder in holders)
        assert stat.S_IMODE(live.parent.stat().st_mode) == 0o700
        holders[1].kill()
        holders[1].wait()
        assert (killed / "ray").is_dir()
        with embedded_ray.private_session(tmp_path) as ours:
            assert {path for path in ours.parent.iterdir() if path.is_dir()} == {live, ours}
            assert (live / "ray").is_dir()
        assert not ours.exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def test_a_session_folder_that_others_may_enter_is_an_error(tmp_path):
    (tmp_path / f"dpo-ray-{os.getuid()}").mkdir()
    (tmp_path / f"dpo-ray-{os.getuid()}").chmod(0o755)
    with (
        pytest.raises(UserError, match="is not a folder of mode 0700 that belongs to this user"),
        embedded_ray.private_session(tmp_path),
    ):
        pass
    (tmp_path / f"dpo-ray-{os.getuid()}").rmdir()
    (tmp_path / f"dpo-ray-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(UserError, match="Delete it, or set TMPDIR"), embedded_ray.private_session(tmp_path):
        pass
