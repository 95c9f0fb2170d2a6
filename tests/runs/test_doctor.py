"""`dpo doctor` says whether the machine is ready and the run fits, before hours are spent."""

import fcntl
import http.server
import json
import os
import shutil
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

from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.doctor import capacity, checks, network_checks, stale_locks
from tasks.doctor.report import Report, within
from tasks.runs import dvc, records
from tests.support.workspaces import make_workspace
from training.cuda_compat import Stack, mismatch


@pytest.fixture
def workspace(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make_workspace(tmp_path / "workspace", tiny_base, cluster={"actor_train.num_workers": 2})
    monkeypatch.chdir(root)
    return root


def test_a_good_workspace_is_told_what_training_needs(workspace, capsys):
    checks.run_checks(None)
    output = capsys.readouterr().out
    assert "ok     params.yaml and infra/cluster.yaml are valid" in output
    assert "ok     train needs about 1.0 GiB" in output
    assert "ok     this run writes up to 0.0 GiB, and" in output
    assert "ok     no stale locks" in output
    assert f"ok     MLflow's store is {workspace}/.mlflow/mlflow.db" in output
    assert "on each of 2 workers" in output
    assert "ok     inference needs 0.0 GiB for the weights, plus activations, on each of 1 workers" in output


def test_what_cannot_fit_is_wrong_with_the_setting_to_change(workspace, capsys):
    text = (workspace / "infra/cluster.yaml").read_text()
    text = text.replace("row_tokens: 256", "row_tokens: 900000000").replace(
        "num_workers: 1\n", "num_workers: 10000000\n"
    )
    (workspace / "infra/cluster.yaml").write_text(text)
    assert checks.run_checks(None) == 1
    output = capsys.readouterr().out
    assert (
        "10000000 workers, more than this machine's memory: set the dtype of reference, train and evaluate to "
        "bfloat16, or inference.zero" in output
    )
    assert "more than this machine's memory: lower actor_train in infra/cluster.yaml row_tokens" in output


def test_a_model_in_the_hubs_cache_is_measured_as_dpo_plan_measures_it(
    workspace, tiny_base, tmp_path, monkeypatch, capsys
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--owner--name"
    shutil.copytree(tiny_base, cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    params = load_params()
    source = params.source.model_copy(update={"model": "hub:owner/name@main"})
    capacity.fit(Report(), params.model_copy(update={"source": source}), load_cluster())
    output = capsys.readouterr().out
    assert "train needs about 1.0 GiB" in output
    assert "is not on this machine yet" not in output


def test_a_typo_is_one_line(workspace, capsys):
    text = (workspace / "params.yaml").read_text()
    (workspace / "params.yaml").write_text(text.replace("  beta:", "  bta:"))
    assert checks.run_checks(None) == 1
    assert "WRONG  params.yaml: Unknown key `train.bta`. Did you mean `train.beta`?" in capsys.readouterr().out


def test_packages_that_are_not_as_locked_are_named(tmp_path, capsys):
    lock = tmp_path / "requirements.lock"
    lock.write_text(
        "pytest==0.1 \\\n    --hash=sha256:ab \\\n    --hash=sha256:cd\nno-such-package==1.0\n"
        'of-another-python==2.0 ; python_version < "3.0" \\\n    --hash=sha256:ef\n'
    )
    report = Report()
    checks.packages(report, lock)
    assert report.problems == 1
    output = capsys.readouterr().out
    assert "no-such-package is missing (locked: 1.0)" in output
    assert "(locked: 0.1)" in output
    assert "of-another-python" not in output


LLAMA_8B = SimpleNamespace(parameters=8 * 2**30, trainable=2**27)  # a LoRA adapter of an eighth of a GiB of weights


def test_disk_is_held_against_this_runs_own_files(workspace, monkeypatch, capsys):
    params, cluster = load_params(), load_cluster()
    parts = capacity.run_needs(params, cluster, LLAMA_8B)
    gib = {name: size / 2**30 for name, size in parts.items()}
    # float32 and AdamW: 4 + 12 bytes of each trainable weight, two kept and one being written: 0.125 x 16 x 3
    assert gib["checkpoints"] == 6.0
    assert gib["policy"] == 1.5  # 0.125 x 4 bytes, in three places
    assert gib["export"] == 64.0  # 8 x 4 bytes, as an out and in the cache
    assert gib["registry"] == 0.0  # too large to be copied there
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=70 * 2**30, total=99 * 2**30))
    report = Report()
    capacity.disk(report, params, cluster, LLAMA_8B)
    assert "WRONG  this run writes up to 71.5 GiB (checkpoints 6.0, policy 1.5, export 64.0), and 70.0 GiB" in (
        capsys.readouterr().out
    )
    assert report.problems == 1


def test_a_containers_shared_memory_is_too_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=64 * 2**20, total=64 * 2**20))
    capacity.shared_memory(Report(), tmp_path)
    assert "has 0.062 GiB" in (output := capsys.readouterr().out)
    assert "`--shm-size=8g`" in output


@pytest.mark.parametrize(
    ("stack", "output"),
    [
        (Stack("2.13.0", None, "580.1", False), "is a CPU build, but this machine has an NVIDIA driver (580.1)"),
        (Stack("2.13.0", "13.0", "535.9", False), "needs driver 580 or newer; this machine has 535.9"),
        (Stack("2.13.0", "12.8", "570.2", False), "sees no GPU. Check CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_torch_that_does_not_fit_the_driver_is_told_apart(stack, output):
    assert output in (mismatch(stack) or "")


def test_a_good_driver_or_none_is_no_finding():
    assert mismatch(Stack("2.13.0", "12.8", "570.2", True)) is None
    assert mismatch(Stack("2.13.0", None, None, False)) is None


@pytest.fixture
def locked(tmp_path, monkeypatch) -> Path:
    """A project with one of each lock that a killed process leaves behind."""
    root = tmp_path / "project"
    monkeypatch.setattr(records, "runs_folder", lambda: root / ".scratch/runs")
    for name, content in {
        ".scratch/run.lock": json.dumps({"pid": 99999999, "command": "python -m tasks.train", "since": "2026-01-01"}),
        ".dvc/tmp/rwlock": json.dumps({"write": {"data/raw": {"pid": 99999999, "cmd": "dvc repro"}}, "read": {}}),
        ".git/index.lock": "",
        ".scratch/runs/one/record.json": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    return root


def test_stale_locks_are_named_and_cleared_when_asked(locked, tmp_path, capsys):
    report = Report()
    stale_locks.locks(report, locked)
    output = capsys.readouterr().out
    assert report.problems == 3  # the kernel has released run.lock, whatever name is in it
    assert output.count("Run `dpo doctor --fix` to clear it.") == 3
    assert "rwlock names processes that are gone (99999999)" in output
    assert "index.lock was left behind 60 minutes ago" in output
    assert "one/record.json is empty or damaged" in output

    stale_locks.locks(Report(fix=True), locked)
    assert capsys.readouterr().out.count("fixed ") == 3
    report = Report()
    stale_locks.locks(report, locked)
    assert (report.problems, capsys.readouterr().out) == (0, "  ok     no stale locks\n")


def test_locks_of_the_living_stay(locked, capsys):
    reader = {"pid": os.getpid(), "cmd": "x"}
    (locked / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {}, "read": {"a": [reader]}}))
    os.utime(locked / ".git/index.lock")
    (locked / ".scratch/runs/one/record.json").unlink()
    with (locked / ".scratch/run.lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        report = Report(fix=True)
        stale_locks.locks(report, locked)
    output = capsys.readouterr().out
    assert "note   a run is using" in output
    assert f"note   DVC holds files in {locked}: process {os.getpid()}" in output
    assert (locked / ".git/index.lock").exists()
    assert "fixed" not in output


def test_a_damaged_lock_of_dvcs_is_cleared(locked, capsys):
    (locked / ".dvc/tmp/rwlock").write_text('{"write": {"da')
    stale_locks.locks(Report(fix=True), locked)
    assert "rwlock is damaged, and DVC refuses every command because of it: cleared" in capsys.readouterr().out
    assert not (locked / ".dvc/tmp/rwlock").exists()


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
    report = Report()
    network_checks.tracking(report, load_cluster().model_copy(update={"tracking_uri": uri}))
    return report.problems


def test_the_tracking_server_is_asked_for_its_version_and_its_time(workspace, monkeypatch, capsys):
    with server("3.17.2") as uri:
        assert ask_tracking(uri) == 0
        assert f"ok     the tracking server {uri} answers, MLflow 3.17.2" in capsys.readouterr().out
    with server("2.9.0", skew=900) as uri:
        assert ask_tracking(uri) == 2
    output = capsys.readouterr().out
    assert "the tracking server has MLflow 2.9.0, and this environment has 3." in output
    assert "s behind http://127.0.0.1" in output
    assert "`timedatectl set-ntp true`" in output
    assert ask_tracking("http://127.0.0.1:9") == 1
    assert "A run continues without it, and `dpo sync` sends its metrics later" in capsys.readouterr().out


def test_nothing_hangs(workspace, monkeypatch, capsys):
    monkeypatch.setattr(network_checks, "SECONDS", 0.3)
    began = time.monotonic()
    with server("3.17.2", delay=2.0) as uri:
        assert ask_tracking(uri) == 1
        assert time.monotonic() - began < 1.5
    assert isinstance(within(0.1, lambda: time.sleep(5)), TimeoutError)


def test_unsent_metrics_are_reported(workspace, capsys):
    folder = workspace / ".scratch/runs/lonely"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"kind": "start"}\n')
    ask_tracking("sqlite:///.mlflow/mlflow.db")
    assert "note   1 runs have metrics that MLflow lacks (lonely): run `dpo sync`" in capsys.readouterr().out


def test_remotes_that_cannot_be_reached_are_wrong(workspace, monkeypatch, capsys):
    remotes = {
        "near": {"url": "../../store"},
        "far": {"url": "s3://bucket", "endpointurl": "http://127.0.0.1:9"},
        "dark": {"url": "s3://bucket"},
    }
    monkeypatch.setattr(dvc, "remotes", lambda root: remotes)
    report = Report()
    network_checks.remotes(report, workspace)
    output = capsys.readouterr().out
    assert report.problems == 2
    assert "DVC's remote near is" in output
    assert "DVC's remote far (http://127.0.0.1:9) does not answer" in output
    assert "note   DVC's remote dark (s3://bucket) cannot be checked" in output


@pytest.mark.slow
def test_dvcs_own_remotes_are_read(tmp_path):
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / ".dvc/config").write_text(
        "['remote \"store\"']\n    url = s3://bucket/x\n    endpointurl = http://h:1\n"
    )
    assert dvc.remotes(tmp_path) == {"store": {"url": "s3://bucket/x", "endpointurl": "http://h:1"}}
