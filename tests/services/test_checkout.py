"""infra/checkout.sh creates the containers' shared checkout from an image and upgrades it from a newer one."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.workspaces import PROJECT

Process = subprocess.CompletedProcess[str]
PARAMS = "train:\n  beta: 0.1\n  epochs: 1\n\n\n\n\nexport:\n  dtype: float32\n"


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=user", "-c", "user.email=user@localhost"]
    return subprocess.run(["git", *who, *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def upgrade(folder: Path, image: str, **env: str) -> Process:
    command = ["bash", str(PROJECT / "infra" / "checkout.sh"), str(folder / image), str(folder / "dpo")]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=900)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images, and a checkout of the first with a run's branch and a user's edits."""
    first, second = tmp_path / "first", tmp_path / "second"
    for image in (first, second):
        (image / "flows").mkdir(parents=True)
        (image / ".gitignore").write_text(".scratch/\n")
        (image / "params.yaml").write_text(PARAMS)
        (image / "flows/dpo.py").write_text(f"'''of the {image.name} image'''\n")
    (first / "flows/old.py").touch()
    (second / "flows/new.py").write_text("new\n")
    (second / "params.yaml").write_text(PARAMS.replace("float32", "bfloat16") + "  gguf: []\n")
    done = upgrade(tmp_path, "first")
    assert (done.returncode, done.stderr) == (0, "")
    root = tmp_path / "dpo"
    git(root, "branch", "runs/one")
    (root / "mine.py").touch()
    git(root, "add", "mine.py")
    git(root, "commit", "-q", "-m", "mine")
    (root / "params.yaml").write_text(PARAMS.replace("beta: 0.1", "beta: 0.2"))  # not committed
    (root / "pairs.jsonl").write_text("{}\n")  # not tracked
    return tmp_path


def upgraded(root: Path) -> bool:
    wanted = PARAMS.replace("beta: 0.1", "beta: 0.2").replace("float32", "bfloat16") + "  gguf: []\n"
    assert (root / "params.yaml").read_text() == wanted
    assert git(root, "status", "--porcelain").splitlines() == ["?? pairs.jsonl"]
    code = sorted(path.name for path in (root / "flows").iterdir())
    return code == ["dpo.py", "new.py"] and "of the second" in (root / "flows/dpo.py").read_text()


def test_a_new_image_brings_its_code_and_keeps_edits_runs_and_data(folder: Path) -> None:
    root = folder / "dpo"
    before, run = git(root, "rev-parse", "HEAD"), git(root, "rev-parse", "runs/one")
    same = upgrade(folder, "first")  # the worker starts again
    assert (same.returncode, same.stdout + same.stderr, git(root, "rev-parse", "HEAD")) == (0, "", before)
    git(root, "branch", "-D", "image")  # as in a checkout of a version without upgrades
    done = upgrade(folder, "second")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{root} now has the code of the new image. Your edits are kept: mine.py params.yaml \n"
    assert upgraded(root)
    assert (root / "mine.py").exists()
    assert (root / "pairs.jsonl").read_text() == "{}\n"
    assert git(root, "rev-parse", "runs/one") == run
    again = git(root, "rev-parse", "HEAD")
    assert upgrade(folder, "second").stdout == ""
    assert git(root, "rev-parse", "HEAD") == again


def test_conflicting_edits_stop_the_upgrade_and_stay(folder: Path) -> None:
    root = folder / "dpo"
    (root / "params.yaml").write_text(PARAMS.replace("float32", "float16"))
    for _ in range(2):
        done = upgrade(folder, "second")
        assert done.returncode == 1
        assert "your edits in" in done.stderr
        assert "change the same lines of: params.yaml. Nothing was upgraded. Merge them (`cd " in done.stderr
    assert (root / "params.yaml").read_text() == PARAMS.replace("float32", "float16")
    assert "of the first" in (root / "flows/dpo.py").read_text()
    git(root, "merge", "-q", "-X", "ours", "image")  # what the message asks for
    done = upgrade(folder, "second")
    assert (done.returncode, done.stdout) == (0, "")
    assert "of the second" in (root / "flows/dpo.py").read_text()


def test_an_upgrade_that_was_killed_is_completed(folder: Path, tmp_path: Path) -> None:
    root, fake = folder / "dpo", tmp_path / "fake"
    fake.mkdir()
    killed = f'#!/bin/sh\ncase "$*" in *reset*) kill -9 $PPID; exit 1;; esac\nexec {shutil.which("git")} "$@"\n'
    (fake / "git").write_text(killed)
    (fake / "git").chmod(0o755)
    assert upgrade(folder, "second", PATH=f"{fake}:{os.environ['PATH']}").returncode == -9
    (root / "flows/dpo.py").write_text("half a fi")
    (root / ".git/index.lock").touch()
    assert upgrade(folder, "second").returncode == 0
    assert upgraded(root)


def test_an_upgrade_waits_for_an_active_run(folder: Path) -> None:
    lock = folder / "dpo" / ".scratch" / "worktrees" / "two" / ".scratch" / "run.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = ["bash", str(PROJECT / "infra" / "checkout.sh"), str(folder / "second"), str(folder / "dpo")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            line = process.stdout.readline()
            assert "Waiting for the run in " in line
            assert line.endswith("/.scratch/worktrees/two: its code must not change while it runs\n")
            assert "of the first" in (folder / "dpo/flows/dpo.py").read_text()
            fcntl.flock(held, fcntl.LOCK_UN)
            process.communicate(timeout=900)
    assert process.returncode == 0
    assert upgraded(folder / "dpo")


def test_an_untracked_file_with_the_name_of_a_new_file_is_renamed(folder: Path) -> None:
    (folder / "dpo/flows/new.py").write_text("mine\n")
    done = upgrade(folder, "second")
    assert "Your untracked file of that name is now flows/new.py.before-upgrade" in done.stdout
    assert (folder / "dpo/flows/new.py").read_text() == "new\n"
    assert (folder / "dpo/flows/new.py.before-upgrade").read_text() == "mine\n"


def test_a_repository_of_your_own_is_cloned_and_not_upgraded(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    git(theirs, "init", "-q", "-b", "main")
    git(theirs, "commit", "-q", "--allow-empty", "-m", "theirs")
    shutil.rmtree(folder / "dpo")
    for _ in range(2):
        done = upgrade(folder, "second", DPO_REPOSITORY=str(theirs))
        assert (done.returncode, done.stdout) == (0, "")
    assert git(folder / "dpo", "log", "--format=%s").split() == ["theirs"]
    assert not (folder / "dpo" / "params.yaml").exists()
