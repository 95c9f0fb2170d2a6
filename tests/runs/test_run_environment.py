"""Which checkout and which run a process works for, and what its children learn of it."""

import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from tasks.checkout import HOME, RUN, child_environment, kept_checkout, main_checkout, this_run
from tasks.runs.workspace import Workspace
from tests.support.workspaces import PROJECT

SHOW = "from tasks.checkout import *; print(main_checkout(), this_run() or 'by hand')"


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HOME, RUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))


def child(env: dict[str, str], cwd: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SHOW], cwd=cwd, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split(maxsplit=1)


def test_the_current_folder_is_the_checkout_unless_it_is_named_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, worktree = tmp_path / "named", tmp_path / "worktree"
    worktree.mkdir()
    monkeypatch.chdir(tmp_path)
    assert main_checkout() == tmp_path
    with kept_checkout(), chdir(worktree):
        assert main_checkout() == tmp_path
        assert child(child_environment(), worktree) == [str(tmp_path), "by hand\n"]
        with kept_checkout(named):
            assert main_checkout() == named
        assert main_checkout() == tmp_path
    with chdir(worktree):
        assert main_checkout() == worktree
    monkeypatch.setenv(HOME, str(named))
    assert main_checkout() == named


def test_a_child_learns_its_run_and_its_own_children_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert child(child_environment("calm-otter", tmp_path), PROJECT) == [str(tmp_path), "calm-otter\n"]
    assert child(Workspace(tmp_path, "calm-otter").environment(), tmp_path) == [str(PROJECT), "calm-otter\n"]
    monkeypatch.setenv(RUN, "calm-otter")
    assert this_run() == "calm-otter"
    assert child(child_environment(), PROJECT)[1] == "calm-otter\n"


def test_one_module_knows_the_variables() -> None:
    code = [
        path
        for folder in ("cli", "flows", "services", "tasks", "training")
        for path in (PROJECT / folder).rglob("*.py")
    ]
    literal = re.compile(rf"[\"']({HOME}|{RUN})[\"']|\b({HOME}|{RUN})=")
    assert [path.relative_to(PROJECT).as_posix() for path in code if literal.search(path.read_text())] == [
        "tasks/checkout.py"
    ]
    written = re.compile(r"os\.environ(\[(HOME|RUN)\] *=|.*\b(HOME|RUN)\b *:)")
    assert not [path for path in code if written.search(path.read_text())]
