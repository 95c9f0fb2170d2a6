"""`make doctor` says whether the machine is ready and the run fits, before hours are spent."""

import fcntl
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.doctor import examine, locks, network, space
from tasks.doctor.findings import Findings, within
from tasks.params import load_cluster, load_params
from tests.workspaces import make_workspace
from training.driver import Stack, mismatch


@pytest.fixture
def workspace(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make_workspace(tmp_path / "workspace", tiny_base)
    monkeypatch.chdir(root)
    return root


def test_a_good_workspace_is_told_what_training_needs(workspace, capsys):
    examine.look(None)
    said = capsys.readouterr().out
    assert "ok     params.yaml and infra/cluster.yaml are good" in said
    assert "ok     train needs about 1.0 GiB" in said
    assert "ok     this run writes up to 0.0 GiB, and" in said
    assert "ok     no lock was left behind" in said
    assert f"ok     MLflow's store is {workspace}/.mlflow/mlflow.db" in said
    assert "on each of 2 workers" in said
    assert "ok     evaluate needs 0.0 GiB for the weights, and room for its passes, on each of 1 workers" in said


def test_what_cannot_fit_is_wrong_with_the_setting_to_change(workspace, capsys):
    text = (workspace / "infra/cluster.yaml").read_text()
    text = text.replace("row_tokens: 256", "row_tokens: 900000000").replace(
        "num_workers: 1\n", "num_workers: 10000000\n"
    )
    (workspace / "infra/cluster.yaml").write_text(text)
    assert examine.look(None) == 1
    said = capsys.readouterr().out
    assert "10000000 workers, more than this machine's memory: set evaluate.dtype to bfloat16, or evaluate.zero" in said
    assert "more than this machine's memory: lower actor_train in infra/cluster.yaml row_tokens" in said


def test_a_typo_is_one_line(workspace, capsys):
    text = (workspace / "params.yaml").read_text()
    (workspace / "params.yaml").write_text(text.replace("  beta:", "  bta:"))
    assert examine.look(None) == 1
    assert "WRONG  params.yaml: `train.bta` is not a key of ours. Did you mean `beta`?" in capsys.readouterr().out


def test_packages_that_are_not_as_locked_are_named(tmp_path, capsys):
    lock = tmp_path / "requirements.lock"
    lock.write_text(
        "pytest==0.1 \\\n    --hash=sha256:ab \\\n    --hash=sha256:cd\nno-such-package==1.0\n"
        'of-another-python==2.0 ; python_version < "3.0" \\\n    --hash=sha256:ef\n'
    )
    found = examine.Findings()
    examine.packages(found, lock)
    assert found.bad == 1
    said = capsys.readouterr().out
    assert "no-such-package is missing (locked: 1.0)" in said
    assert "(locked: 0.1)" in said
    assert "of-another-python" not in said


LLAMA_8B = SimpleNamespace(parameters=8 * 2**30, trainable=2**27)  # a LoRA adapter of an eighth of a GiB of weights


def test_disk_is_held_against_this_runs_own_files(workspace, monkeypatch, capsys):
    params, cluster = load_params(), load_cluster()
    parts = space.needed(params, cluster, LLAMA_8B)
    gib = {name: size / 2**30 for name, size in parts.items()}
    # float32 and AdamW: 4 + 12 bytes of each trainable weight, two kept and one being written: 0.125 x 16 x 3
    assert gib["checkpoints"] == 6.0
    assert gib["policy"] == 1.5  # 0.125 x 4 bytes, in three places
    assert gib["export"] == 64.0  # 8 x 4 bytes, as an out and in the cache
    assert gib["registry"] == 0.0  # too large to be copied there
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=70 * 2**30, total=99 * 2**30))
    found = Findings()
    space.disk(found, params, cluster, LLAMA_8B)
    assert "WRONG  this run writes up to 71.5 GiB (checkpoints 6.0, policy 1.5, export 64.0), and 70.0 GiB" in (
        capsys.readouterr().out
    )
    assert found.bad == 1


def test_a_containers_shared_memory_is_too_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=64 * 2**20, total=64 * 2**20))
    space.shared_memory(Findings(), tmp_path)
    assert "has 0.062 GiB" in (said := capsys.readouterr().out)
    assert "`--shm-size=8g`" in said


@pytest.mark.parametrize(
    ("stack", "said"),
    [
        (Stack("2.13.0", None, "580.1", False), "built for CPUs, and this machine has an NVIDIA driver (580.1)"),
        (Stack("2.13.0", "13.0", "535.9", False), "needs driver 580 or newer, and here is 535.9"),
        (Stack("2.13.0", "12.8", "570.2", False), "sees no GPU. Look at CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_torch_that_does_not_fit_the_driver_is_told_apart(stack, said):
    assert said in (mismatch(stack) or "")


def test_a_good_driver_or_none_is_no_finding():
    assert mismatch(Stack("2.13.0", "12.8", "570.2", True)) is None
    assert mismatch(Stack("2.13.0", None, None, False)) is None


@pytest.fixture
def locked(tmp_path, monkeypatch) -> Path:
    """A project with one of each lock that a killed process leaves behind."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(locks, "_running", lambda names: False)  # whatever else this machine does just now
    root = tmp_path / "project"
    for name, content in {
        ".scratch/run.lock": json.dumps({"pid": 99999999, "command": "python -m tasks.train"}),
        ".dvc/tmp/rwlock": json.dumps({"write": {"data/raw": {"pid": 99999999, "cmd": "dvc repro"}}, "read": {}}),
        ".git/index.lock": "",
        "../extensions/py311/cpu_adam/lock": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    return root


def test_stale_locks_are_named_and_cleared_when_asked(locked, tmp_path, capsys):
    found = Findings()
    locks.locks(found, locked)
    said = capsys.readouterr().out
    assert found.bad == 4
    assert said.count("Run `make doctor FIX=1` to clear it.") == 4
    assert "still names process 99999999, which was killed" in said
    assert "rwlock names processes that are gone (99999999)" in said
    assert "index.lock was left behind 60 minutes ago" in said
    assert "cpu_adam/lock: a killed build left it 60 minutes ago, and every run waits" in said

    locks.locks(Findings(fix=True), locked)
    assert capsys.readouterr().out.count("fixed ") == 4
    found = Findings()
    locks.locks(found, locked)
    assert (found.bad, capsys.readouterr().out) == (0, "  ok     no lock was left behind\n")


def test_locks_of_the_living_stay(locked, capsys):
    reader = {"pid": os.getpid(), "cmd": "x"}
    (locked / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {}, "read": {"a": [reader]}}))
    now = time.time()
    for path in (locked / ".git/index.lock", locked / "../extensions/py311/cpu_adam/lock"):
        os.utime(path, (now, now))
    with (locked / ".scratch/run.lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = Findings(fix=True)
        locks.locks(found, locked)
    said = capsys.readouterr().out
    assert "note   a run is at work in" in said
    assert f"note   DVC holds files in {locked}: process {os.getpid()}" in said
    assert "note   an extension of torch's is being built" in said
    assert (locked / ".git/index.lock").exists()
    assert "fixed" not in said


def test_a_damaged_lock_of_dvcs_is_cleared(locked, capsys):
    (locked / ".dvc/tmp/rwlock").write_text('{"write": {"da')
    locks.locks(Findings(fix=True), locked)
    assert "rwlock is damaged, and DVC refuses every command because of it: cleared" in capsys.readouterr().out
    assert not (locked / ".dvc/tmp/rwlock").exists()


def test_a_taken_port_names_who_has_it(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("PORT", str(port := taken.getsockname()[1]))
        network.ports(Findings())
    said = capsys.readouterr().out
    assert f"note   port {port} of MLflow's pages is taken by process {os.getpid()}, `" in said
    assert f"`make up PORT={port + 1}`" in said


@contextmanager
def server(version: str, skew: float = 0.0, delay: float = 0.0) -> Iterator[str]:
    """A little MLflow: it knows its version, and its clock is `skew` seconds ahead."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(delay)
            self.send_response_only(200)
            self.send_header("Date", formatdate(time.time() + skew, usegmt=True))
            self.end_headers()
            self.wfile.write(version.encode())

        def log_message(self, format: str, *given: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def ask_tracking(uri: str) -> int:
    found = Findings()
    network.tracking(found, load_cluster().model_copy(update={"tracking_uri": uri}))
    return found.bad


def test_the_tracking_server_is_asked_for_its_version_and_its_time(workspace, monkeypatch, capsys):
    with server("3.17.2") as uri:
        assert ask_tracking(uri) == 0
        assert f"ok     the tracking server {uri} answers, MLflow 3.17.2" in capsys.readouterr().out
    with server("2.9.0", skew=900) as uri:
        assert ask_tracking(uri) == 2
    said = capsys.readouterr().out
    assert "the tracking server has MLflow 2.9.0 and this environment 3." in said
    assert "s behind http://127.0.0.1" in said
    assert "`timedatectl set-ntp true`" in said
    assert ask_tracking("http://127.0.0.1:9") == 1
    assert "a run goes on without it, and `make sync` sends its figures later" in capsys.readouterr().out


def test_nothing_hangs(workspace, monkeypatch, capsys):
    monkeypatch.setattr(network, "SECONDS", 0.3)
    began = time.monotonic()
    with server("3.17.2", delay=2.0) as uri:
        assert ask_tracking(uri) == 1
        assert time.monotonic() - began < 1.5
    assert isinstance(within(0.1, lambda: time.sleep(5)), TimeoutError)


def test_figures_that_wait_are_told(workspace, capsys):
    folder = workspace / ".scratch/runs/lonely"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"kind": "start"}\n')
    ask_tracking("sqlite:///.mlflow/mlflow.db")
    assert "note   MLflow has not got all of 1 runs (lonely): `make sync` sends it" in capsys.readouterr().out


def test_the_hub_and_remotes_that_cannot_be_reached_are_wrong(workspace, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    params = load_params()
    source = params.source.model_copy(update={"model": "hub:nobody/no-such-model@main"})
    found = Findings()
    network.hub(found, params.model_copy(update={"source": source}))
    assert found.bad == 1
    assert "source.model: http://127.0.0.1:9 does not answer" in capsys.readouterr().out

    remotes = {
        "near": {"url": "../../store"},
        "far": {"url": "s3://bucket", "endpointurl": "http://127.0.0.1:9"},
        "dark": {"url": "s3://bucket"},
    }
    monkeypatch.setattr(network, "_remotes", lambda root: remotes)
    found = Findings()
    network.remotes(found, workspace)
    said = capsys.readouterr().out
    assert found.bad == 2
    assert "DVC's remote near is to be" in said
    assert "DVC's remote far (http://127.0.0.1:9) does not answer" in said
    assert "note   DVC's remote dark (s3://bucket) cannot be tried" in said


@pytest.mark.slow
def test_dvcs_own_remotes_are_read(tmp_path):
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / ".dvc/config").write_text(
        "['remote \"store\"']\n    url = s3://bucket/x\n    endpointurl = http://h:1\n"
    )
    assert network._remotes(tmp_path) == {"store": {"url": "s3://bucket/x", "endpointurl": "http://h:1"}}
