"""The workspace lock, with real processes: one holder, a refusal that names it, nothing stale after kill -9."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.system.lock import TOKEN, workspace_lock

PROJECT = Path(__file__).parents[2]
HOLD = """
import sys
from pathlib import Path
from tasks.system.lock import workspace_lock
with workspace_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def start_holder(root: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(root)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=PROJECT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start_holder(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_told_who_is_at_work(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal, workspace_lock(tmp_path):
        pass
    sentence = str(refusal.value)
    noted = json.loads((tmp_path / ".scratch" / "run.lock").read_text())
    assert noted["pid"] == holder.pid
    for part in (f"Process {holder.pid}", noted["host"], noted["since"], str(tmp_path), f"kill {holder.pid}"):
        assert part in sentence


def test_a_killed_holder_leaves_nothing_stale(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    with workspace_lock(tmp_path):
        assert json.loads((tmp_path / ".scratch" / "run.lock").read_text())["pid"] == os.getpid()


def test_a_child_of_the_holder_passes_and_leaves_the_lock_held(tmp_path: Path) -> None:
    with workspace_lock(tmp_path):
        process = start_holder(tmp_path)  # inherits the token
        out, err = process.communicate("")
        assert (process.returncode, out, err) == (0, "held\n", "")
        stranger = start_holder(tmp_path, {**os.environ, TOKEN: "another"})
        assert "is using" in stranger.communicate("")[1]


def test_the_token_is_gone_when_the_lock_is_released(tmp_path: Path) -> None:
    before = os.environ.get(TOKEN, "")
    with workspace_lock(tmp_path):
        assert os.environ[TOKEN] != before
    assert os.environ[TOKEN] == before
    with workspace_lock(tmp_path):
        pass
