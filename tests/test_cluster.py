"""A Ray cluster that is configured wrongly is told in a sentence, before work starts. Two hosts: test_two_hosts.py."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.server import free_port
from tasks.errors import UserError
from tasks.machines import cluster, nodes
from tasks.place import load_cluster

PROJECT = Path(__file__).resolve().parents[1]


def refused(content: dict) -> str:
    with pytest.raises(UserError) as error:
        load_cluster(PROJECT, content)
    return str(error.value)


def test_an_address_is_local_auto_or_host_and_port():
    for good in ("local", "auto", "10.0.0.1:6379", "ray-head.dpo.svc:6379"):
        assert load_cluster(PROJECT, {"ray": {"address": good}}).ray.address == good
    said = refused({"ray": {"address": "ray://10.0.0.1:10001"}})
    assert "it must be `local`, the head's host:port as 10.0.0.1:6379" in said
    assert "`interface` has no effect on address local" in refused({"ray": {"interface": "eth0"}})
    assert "ray.env" in refused({"ray": {"env": {"NCCL_DEBUG": 1}}})


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_missing_token_is_named_with_where_it_was_looked_for(no_token, monkeypatch):
    with pytest.raises(UserError, match=f"RAY_AUTH_TOKEN is not set and {no_token}/.ray/auth_token holds none"):
        cluster._find_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(no_token / "token"))
    with pytest.raises(UserError, match=f"{no_token}/token holds none"):
        cluster._find_token()
    (no_token / "token").write_text("abc")
    cluster._find_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_head_that_does_not_answer_is_told_at_once():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"No Ray head answers at {address}.*`ray start --head --port"):
        cluster._reach(address)


def test_a_node_with_other_versions_is_named_with_both():
    ours = nodes.facts()
    theirs = {**ours, "python": "3.11.2", "torch": "2.12.0"}
    (said,) = nodes.mismatches({"10.0.0.1": ours, "10.0.0.2": theirs}, ours)
    assert said.startswith(f"Ray node 10.0.0.2 has python 3.11.2 (here: {ours['python']}), torch 2.12.0 (here: ")


def test_the_same_files_are_told_from_others_of_the_same_size(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_text("1")
    before = [nodes.listing(tmp_path, [Path("data")], times) for times in (True, False)]
    (tmp_path / "data/a").write_text("2")
    os.utime(tmp_path / "data/a", ns=(1, 1))
    after = [nodes.listing(tmp_path, [Path("data")], times) for times in (True, False)]
    assert before[0] != after[0]
    assert before[1] == after[1] == [("data/a", 1)]


EMBEDDED = """
from pathlib import Path
from tasks import place
from tasks.errors import UserError
from tasks.machines import cluster, nodes
nodes.SOON = 1.0
changes = {"reference": {"placement": "STRICT_SPREAD"}, "actor_train": {"resources": {"trainer": 1}}}
configured = place.load_cluster(Path(place.__file__).parents[1], changes)
with cluster.ray_cluster(configured.ray, 2):
    try:
        with cluster.room_for(configured.ray, configured.actor_train, 1):
            print("a trainer fits")
    except UserError as error:
        print(f"refused: {error}")
    with cluster.room_for(configured.ray, configured.reference, 1):
        print("one fits")
        import ray
        print("worker imports", ray.get(ray.remote(lambda: __import__("only_on_pythonpath").__name__).remote()))
        at_start = ray.remote(lambda: open("/proc/self/environ").read())  # of the process, before it imports torch
        print("worker's environment:", ray.get(at_start.remote()).split(chr(0)))
    with cluster.room_for(configured.ray, configured.reference, 2):
        print("two fit")
"""


def embedded(folder: Path, packages: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{packages}"}
    return subprocess.run([sys.executable, "-c", EMBEDDED], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_group_that_will_never_fit_an_embedded_cluster_is_refused(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "only_on_pythonpath.py").touch()
    done = embedded(tmp_path, tmp_path / "packages")
    assert (
        "refused: infra/cluster.yaml: 1 workers with 1 CPU, 1 trainer each do not fit 1 nodes with 2 CPU" in done.stdout
    )
    assert "No node offers the custom resource trainer, which `resources` of the worker group in" in done.stdout
    assert "one fits" in done.stdout
    assert "worker imports only_on_pythonpath" in done.stdout
    # CUDA's allocator reads it once; without it, it reserves three times what rows of many lengths take.
    assert "'PYTORCH_ALLOC_CONF=expandable_segments:True'" in done.stdout
    assert "two fit" not in done.stdout
    assert "2 workers with 1 CPU each do not fit 1 nodes with 2 CPU in all" in done.stderr


@pytest.mark.slow
def test_a_ray_that_cannot_start_says_why_and_is_not_tried_again(tmp_path):
    """Ray itself says "timed out during startup", after 30 seconds."""
    broken = tmp_path / "packages" / "aiohttp"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('this aiohttp is broken')")
    began = time.monotonic()
    done = embedded(tmp_path, tmp_path / "packages")
    assert "UserError: Ray does not start: its process dashboard_agent failed. Its log ends with:" in done.stderr
    assert "ImportError: this aiohttp is broken" in done.stderr.partition("UserError")[2]
    assert time.monotonic() - began < 90  # three tries take longer


def test_a_cluster_without_a_custom_resource_is_told_how_to_offer_it():
    assert nodes._offer(["trainer"], embedded=False) == "start a node with `ray start --resources '{\"trainer\": 1}'`"


CODE = {**os.environ, "PYTHONPATH": str(PROJECT)}
HOLDER = """
import sys, time
from pathlib import Path
from tasks.machines.cluster import private_session
with private_session(Path(sys.argv[1])) as folder:
    (folder / "ray").mkdir(mode=0o777)
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_session_is_private_and_one_left_by_a_killed_process_is_deleted_at_the_next_start(tmp_path):
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
        with cluster.private_session(tmp_path) as ours:
            assert {path for path in ours.parent.iterdir() if path.is_dir()} == {live, ours}
            assert (live / "ray").is_dir()
        assert not ours.exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def test_a_session_folder_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / f"dpo-ray-{os.getuid()}").mkdir()
    (tmp_path / f"dpo-ray-{os.getuid()}").chmod(0o755)
    with (
        pytest.raises(UserError, match="is not a folder of mode 0700 that belongs to this user"),
        cluster.private_session(tmp_path),
    ):
        pass
    (tmp_path / f"dpo-ray-{os.getuid()}").rmdir()
    (tmp_path / f"dpo-ray-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(UserError, match="Delete it, or set TMPDIR"), cluster.private_session(tmp_path):
        pass
