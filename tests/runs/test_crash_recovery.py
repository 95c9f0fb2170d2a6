"""Recovery after a kill: half-written files and stale locks of DVC, of git and of our own."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from dvc.schema import LOCKFILE_SCHEMA
from voluptuous import MultipleInvalid, Schema

from tasks.runs import commits, dvc_lock
from tasks.system import files
from tasks.system.processes import is_alive, this_process
from tests.runs.test_runs import command
from tests.support.fork_server import clean_environment
from tests.support.workspaces import PROJECT, wait_for

pytestmark = pytest.mark.slow
# A run without Prefect; the first call fails after its stages, the next one continues it.
RUN = """
import sys
from tasks.runs import records
from tasks.lifecycle import run_workspace
from tasks.errors import UserError
name, fails = sys.argv[1], sys.argv[2] == "fails"
record = records.read_record(name) or run_workspace.new_record(name, {}, worktree=True, flow_run=name)
try:
    with run_workspace.open_workspace(record, name) as run:
        run.dvc("repro", "prepare")
        if fails:
            raise UserError("stopped")
        run_workspace.commit_results(run)
except UserError:
    if not fails:
        raise
else:
    run_workspace.close_workspace(run)
"""


def environment() -> dict[str, str]:
    return {**clean_environment(), "FORK_STAGES": "1"}


def run(repo: Path, name: str, how: str = "finishes") -> None:
    env = environment()
    done = subprocess.run([sys.executable, "-c", RUN, name, how], cwd=repo, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def git(repo: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=repo, check=True, capture_output=True, text=True).stdout


def test_git_works_after_a_killed_git_left_two_locks(dummy_repo: Path) -> None:
    """As one does that was deleting a branch."""
    git(dummy_repo, "branch", "old")
    git(dummy_repo, "pack-refs", "--all")
    left = [dummy_repo / ".git" / name for name in ("refs/heads/old.lock", "packed-refs.lock")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (time.time() - 3600,) * 2)
    commits.git(dummy_repo, "update-ref", "-d", "refs/heads/old")
    assert not git(dummy_repo, "branch", "--list", "old")
    assert not any(path.exists() for path in left)


def test_a_run_repairs_what_killed_tools_left_and_a_damaged_record_blocks_no_command(dummy_repo: Path) -> None:
    run(dummy_repo, "one", "fails")
    worktree = dummy_repo / ".scratch/worktrees/one"
    whole = (worktree / "dvc.lock").read_text()
    (worktree / "dvc.lock").write_text(whole[: len(whole) // 2])
    past = psutil.Process().create_time() - 3600  # before this process had its id
    lock = {"write": {str(worktree / "data/source"): {"pid": os.getpid(), "cmd": "dvc repro"}}, "read": {}}
    dvc_lock.rwlock(worktree).write_text(json.dumps(lock))  # a process id that we got later
    index = dummy_repo / ".git/worktrees/one/index.lock"
    index.touch()
    for path in (dvc_lock.rwlock(worktree), index):
        os.utime(path, (past, past))
    run(dummy_repo, "one")
    assert yaml.safe_load(git(dummy_repo, "show", "runs/one:dvc.lock")) == yaml.safe_load(whole)
    assert not index.exists()

    run(dummy_repo, "two", "fails")
    shutil.rmtree(dummy_repo / ".git/worktrees/two")  # git thinks that it is missing
    run(dummy_repo, "two")
    assert yaml.safe_load(git(dummy_repo, "show", "runs/two:dvc.lock")) == yaml.safe_load(whole)

    (dummy_repo / ".scratch/runs/one/record.json").write_text("")
    (dummy_repo / ".scratch/hashes.json").write_text('{"/a": [1,')
    shown = command(dummy_repo, environment(), "runs")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "one/record.json is empty or damaged" in shown.stdout
    assert "two  " in shown.stdout
    unused = command(dummy_repo, environment(), "gc", "--keep", "0")
    assert unused.returncode == 0, unused.stderr
    assert "one stays: its record is damaged" in unused.stdout


def test_a_reused_process_id_does_not_count_as_alive() -> None:
    noted = this_process()
    assert is_alive(noted)
    assert not is_alive({**noted, "began": noted["began"] - 100})
    assert not is_alive({**noted, "boot": "another"})
    assert not is_alive({"pid": 2**22 + 1})


@pytest.mark.parametrize("end", ["killed", "not yet collected", "another process has its id"])
def test_the_next_writer_removes_a_half_written_file(tmp_path: Path, end: str) -> None:
    code = "import sys, pathlib, time; from tasks.system import files\n"
    code += "with files.publish(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "folder")], cwd=PROJECT, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    (half,) = tmp_path.iterdir()
    with files.publish(tmp_path / "folder"):
        assert half.exists()  # its writer works
    writer.kill()
    if end == "not yet collected":  # by its parent, for which some containers have nobody
        wait_for(lambda: psutil.Process(writer.pid).status() == psutil.STATUS_ZOMBIE, 60)
    else:
        writer.wait()
    if end == "another process has its id":
        half.rename(half.with_name(half.name.replace(f".{writer.pid}.", f".{os.getpid()}.")))
    with files.publish(tmp_path / "folder"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    writer.wait()


def test_a_dvc_lock_cut_anywhere_is_damaged_or_accepted_by_dvc(tmp_path: Path) -> None:
    path = tmp_path / "dvc.lock"
    params = {"params.yaml": {"train": {"epochs": 1}, "seed": 7}}
    files = [
        {"path": name, "hash": "md5", "md5": digits * 8, "size": 12} for name, digits in (("a", "1234"), ("b", "ab12"))
    ]
    folder = {"path": "c", "hash": "md5", "md5": "0123abcd.dir", "size": 3, "nfiles": 2}
    stages = {
        name: {"cmd": "python -m a", "deps": files, "params": params, "outs": [folder]} for name in ("one", "two")
    }
    dvc_lock.write_lock(tmp_path, stages)
    assert not dvc_lock.is_lock_damaged(tmp_path)
    whole = path.read_text()
    for size in range(len(whole)):
        path.write_text(whole[:size])
        assert dvc_lock.is_lock_damaged(tmp_path) or not is_refused_by_dvc(whole[:size]), whole[:size]


def is_refused_by_dvc(lock: str) -> bool:
    try:
        Schema(LOCKFILE_SCHEMA)(yaml.safe_load(lock))
    except (yaml.YAMLError, MultipleInvalid):
        return True
    return False
