"""Runs side by side in one checkout: each in its own worktree, equal work done once, resumed by name, opened again."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flows import runs as flow_runs
from tasks.errors import UserError
from tasks.machines.lock import TOKEN, held
from tests.conftest import make_dummy_repo
from tests.test_flow import STAGES, flow, git
from tests.test_lock import start_holder
from tests.workspaces import PROJECT, wait_for

Env = dict[str, str]
ASKED = {"a": [], "b": [], "c": ["--set", "train.beta=0.5"], "d": ["--set", "train.beta=0.6"]}  # a and b are equal


def start(root: Path, env: Env, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flows.dpo", *arguments],
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def command(root: Path, env: Env, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=root, env=env, capture_output=True, text=True, timeout=240
    )


def read(root: Path, run: str, name: str) -> Any:
    return json.loads((root / ".scratch" / "runs" / run / name).read_text())


def stored(root: Path, run: str, stage: str) -> str:
    """The md5 of a stage's out.json by the dvc.lock of a run's commit, found in DVC's cache."""
    lock = yaml.safe_load(git(root, "show", f"runs/{run}:dvc.lock"))["stages"][stage]
    folder = next(out["md5"] for out in lock["outs"] if out["path"] == f"data/{stage}")
    listed = json.loads((root / ".dvc/cache/files/md5" / folder[:2] / folder[2:]).read_text())
    return next(file["md5"] for file in listed if file["relpath"] == "out.json")


def expected(root: Path, stage: str, **changes: Any) -> str:
    """What the dummy stage writes: its section of params.yaml."""
    section = yaml.safe_load((root / "params.yaml").read_text())[stage] | changes
    return hashlib.md5(json.dumps(section).encode()).hexdigest()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, prefect_api: Env, mlflow_store: Path) -> tuple[Path, str, str]:
    """Four runs at once in a fresh checkout with changes that are not committed; git's status before and after."""
    root = make_dummy_repo(tmp_path_factory.mktemp("four") / "repo", mlflow_store)
    with (root / "tasks" / "dummy.py").open("a") as file:
        file.write("# not committed\n")
    (root / "tasks" / "extra.py").write_text("# new\n")
    (root / "notes.env").write_text("of no concern to a run\n")
    before = git(root, "status", "--porcelain")
    at_work = [start(root, prefect_api, "--name", name, *given) for name, given in ASKED.items()]
    said = [process.communicate(timeout=240)[0] for process in at_work]
    assert [process.returncode for process in at_work] == [0] * 4, said
    return root, before, git(root, "status", "--porcelain")


@pytest.mark.slow
def test_four_runs_at_once_are_all_correct_and_the_checkout_is_as_it_was(four: tuple[Path, str, str]) -> None:
    root, before, after = four
    assert before == after
    assert not (root / "data").exists()
    assert not (root / "dvc.lock").exists()
    betas = {"a": 0.1, "b": 0.1, "c": 0.5, "d": 0.6}
    for name, beta in betas.items():
        assert yaml.safe_load(git(root, "show", f"runs/{name}:params.yaml"))["train"]["beta"] == beta
        assert stored(root, name, "train") == expected(root, "train", beta=beta)
        assert stored(root, name, "prepare") == expected(root, "prepare")
    assert len({read(root, name, "run.json")["run_id"] for name in betas}) == 4  # each its own run in MLflow


@pytest.mark.slow
def test_what_two_runs_have_in_common_is_computed_once(four: tuple[Path, str, str]) -> None:
    ran = [state["stage"] for name in ASKED for state in read(four[0], name, "stages.json") if state["state"] == "ran"]
    assert {stage: ran.count(stage) for stage in STAGES[:4]} == {"source": 1, "prepare": 1, "reference": 1, "train": 3}


@pytest.mark.slow
def test_a_run_takes_changes_and_new_code_along_and_nothing_else(four: tuple[Path, str, str]) -> None:
    root = four[0]
    assert "# not committed" in git(root, "show", "runs/a:tasks/dummy.py")
    assert git(root, "show", "runs/a:tasks/extra.py") == "# new\n"
    assert "notes.env" not in git(root, "ls-tree", "--name-only", "runs/a")
    assert git(root, "log", "-1", "--format=%s") == "dummy\n"  # the branch has not moved


@pytest.mark.slow
def test_a_finished_worktree_goes_and_its_files_come_back(
    four: tuple[Path, str, str], prefect_api: Env, tmp_path: Path
) -> None:
    root = four[0]
    assert list((root / ".scratch" / "worktrees").iterdir()) == []
    assert (root / ".scratch/runs/c/results/data/metrics/evaluate.json").exists()
    opened = command(root, prefect_api, "flows.open", "c", str(tmp_path / "c"))
    assert opened.stdout.startswith(f"c is in {tmp_path / 'c'}\n"), opened.stderr
    assert json.loads((tmp_path / "c/data/train/out.json").read_text())["beta"] == 0.5
    nobody = command(root, prefect_api, "flows.open", "nobody")
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert nobody.stderr.startswith("error: There is no finished run 'nobody'. Runs: ")


@pytest.mark.slow
def test_a_killed_run_is_resumed_by_name_and_not_twice(four: tuple[Path, str, str], prefect_api: Env) -> None:
    root = four[0]
    killed = start(root, {**prefect_api, "DUMMY": "train:sessions"}, "--set", "train.beta=0.9", "--name", "e")
    pids = root / ".scratch" / "pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 3, 180)
    family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    wait_for((root / ".scratch/runs/e/run.json").exists, 60)  # until MLflow knows it
    killed.kill()
    wait_for(lambda: not any(map(alive, family)), 30)  # in sessions of their own, one without its parent
    killed.communicate()
    parent = read(root, "e", "run.json")["run_id"]
    assert [line.split()[:2] for line in runs(root, prefect_api) if line.startswith("e ")] == [["e", "crashed"]]
    taken = flow(root, prefect_api, "--name", "e")
    assert "continue it with `make resume RUN=e`" in taken.stderr

    again = start(root, {**prefect_api, "DUMMY": "train:slow"}, "--resume", "e")
    wait_for(lambda: read(root, "e", "record.json")["pid"] == again.pid, 120)
    second = command(root, prefect_api, "flows.dpo", "--resume", "e")
    assert second.returncode == 1
    assert second.stderr.startswith(f"error: The run e is at work, in process {again.pid}, since ")
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert "source: unchanged, not run" in said
    assert read(root, "e", "run.json")["run_id"] == parent
    assert len(read(root, "e", "record.json")["flow_runs"]) == 2
    assert yaml.safe_load(git(root, "show", "runs/e:params.yaml"))["train"]["beta"] == 0.9
    over = command(root, prefect_api, "flows.dpo", "--resume", "e")
    assert over.stderr.startswith("error: The run e is finished; there is nothing to resume.")


def runs(root: Path, env: Env) -> list[str]:
    return command(root, env, "flows.runs").stdout.splitlines()


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_is_known_by_prefects_name_and_id_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_runs, "runs_folder", lambda: tmp_path)
    first = "0a1b2c3d-0000-4000-8000-000000000000"
    flow_runs.Record("calm-otter-0a1b2c3d", str(tmp_path), flow_runs=[first], state="failed").write()
    for name in ("calm-otter-0a1b2c3d", "calm-otter", first):
        assert flow_runs.check_resumable(name).name == "calm-otter-0a1b2c3d"
    with pytest.raises(UserError, match="There is no run named 'otter'"):
        flow_runs.known("otter")
    assert flow_runs.label("calm-otter-0a1b2c3d", first) == "calm-otter-0a1b2c3d"  # tried again by Prefect


def test_a_list_whose_reader_has_left_ends_without_a_traceback() -> None:
    text = "from tasks.output import as_command; as_command(lambda: print('x' * 10))()"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", text], stdout=write, stderr=subprocess.PIPE, text=True, cwd=PROJECT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_one_process_may_hold_several_workspaces(tmp_path: Path) -> None:
    before = os.environ.get(TOKEN)
    with held(tmp_path / "one") as one, held(tmp_path / "two") as two:
        assert one != two
        assert os.environ.get(TOKEN) == before  # handed on, and not left where another run finds it
        passes = start_holder(tmp_path / "one", {**os.environ, TOKEN: str(one)})
        assert passes.communicate("")[0] == "held\n"
        stranger = start_holder(tmp_path / "two", {**os.environ, TOKEN: str(one)})
        assert "is at work" in stranger.communicate("")[1]
