"""Parallel runs in one checkout: own worktrees, equal stages computed once, resume by name, `dpo open`."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from services import background, status
from tasks.errors import UserError
from tasks.runs import records
from tasks.system.files import write_json
from tasks.system.lock import TOKEN, hold_workspace
from tests.flows.test_flow import STAGES, flow, git
from tests.runs.test_lock import start_holder
from tests.support.fork_server import fresh
from tests.support.workspaces import PROJECT, wait_for

Env = dict[str, str]
OPTIONS = {"a": [], "b": [], "c": ["--set", "train.beta=0.5"]}  # a and b are equal


def start(root: Path, env: Env, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cli", *arguments],
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def command(root: Path, env: Env, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `dpo` with these arguments."""
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments], cwd=root, env=env, capture_output=True, text=True, timeout=900
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
def three(tmp_path_factory: pytest.TempPathFactory, prefect_api: Env, dummy_template: Path) -> tuple[Path, str, str]:
    """Three runs at once in a fresh checkout with uncommitted changes; git's status before and after."""
    root = Path(shutil.copytree(dummy_template, tmp_path_factory.mktemp("three") / "repo", symlinks=True))
    with (root / "tasks" / "dummy.py").open("a") as file:
        file.write("# not committed\n")
    (root / "tasks" / "extra.py").write_text("# new\n")
    (root / "notes.env").write_text("of no concern to a run\n")
    before = git(root, "status", "--porcelain")
    at_work = [start(root, prefect_api, "run", "--name", name, *options) for name, options in OPTIONS.items()]
    said = [process.communicate(timeout=900)[0] for process in at_work]
    assert [process.returncode for process in at_work] == [0] * 3, said
    return root, before, git(root, "status", "--porcelain")


@pytest.mark.slow
def test_three_runs_at_once_are_correct_and_leave_the_checkout_unchanged(three: tuple[Path, str, str]) -> None:
    root, before, after = three
    assert before == after
    assert not (root / "data").exists()
    assert not (root / "dvc.lock").exists()
    betas = {"a": 0.1, "b": 0.1, "c": 0.5}
    for name, beta in betas.items():
        assert yaml.safe_load(git(root, "show", f"runs/{name}:params.yaml"))["train"]["beta"] == beta
        assert stored(root, name, "train") == expected(root, "train", beta=beta)
        assert stored(root, name, "prepare") == expected(root, "prepare")
    assert len({read(root, name, "run.json")["run_id"] for name in betas}) == 3  # each its own run in MLflow


@pytest.mark.slow
def test_equal_stages_of_two_runs_are_computed_once(three: tuple[Path, str, str]) -> None:
    ran = [
        state["stage"] for name in OPTIONS for state in read(three[0], name, "stages.json") if state["state"] == "ran"
    ]
    assert {stage: ran.count(stage) for stage in STAGES[:4]} == {"source": 1, "prepare": 1, "reference": 1, "train": 2}


@pytest.mark.slow
def test_a_worktree_has_uncommitted_changes_and_new_code_but_no_other_files(three: tuple[Path, str, str]) -> None:
    root = three[0]
    assert "# not committed" in git(root, "show", "runs/a:tasks/dummy.py")
    assert git(root, "show", "runs/a:tasks/extra.py") == "# new\n"
    assert "notes.env" not in git(root, "ls-tree", "--name-only", "runs/a")
    assert git(root, "log", "-1", "--format=%s") == "dummy\n"  # the branch has not moved


@pytest.mark.slow
def test_a_finished_worktree_is_removed_and_dpo_open_restores_its_files(
    three: tuple[Path, str, str], prefect_api: Env, tmp_path: Path
) -> None:
    root = three[0]
    assert list((root / ".scratch" / "worktrees").iterdir()) == []
    assert (root / ".scratch/runs/c/results/data/metrics/evaluate.json").exists()
    opened = command(root, prefect_api, "open", "c", str(tmp_path / "c"))
    assert opened.stdout.startswith(f"c is in {tmp_path / 'c'}\n"), opened.stderr
    assert json.loads((tmp_path / "c/data/train/out.json").read_text())["beta"] == 0.5
    nobody = command(root, prefect_api, "open", "nobody")
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert nobody.stderr.startswith("error: There is no finished run 'nobody'. Runs: ")


@pytest.mark.slow
def test_a_folder_that_dpo_open_prints_outlasts_the_run(
    three: tuple[Path, str, str], prefect_api: Env, tmp_path: Path
) -> None:
    """A version is registered, and may be champion, while its run still promotes and cleans up."""
    root, folder = three[0], tmp_path / "late"
    begun = begun_stages(root)
    at_work = start(root, {**prefect_api, "DUMMY": "train:slow"}, "run", "--name", "late", "--set", "train.beta=0.6")
    wait_for(lambda: begun_stages(root)["train"] > begun["train"], 180)
    early = command(root, prefect_api, "open", "late", str(folder))
    assert early.stderr.startswith(f"error: The run late is still at work in {root / '.scratch/worktrees/late'}, which")
    assert f"`dpo open late {folder}` checks out" in early.stderr
    assert not folder.exists()
    said, _ = at_work.communicate(timeout=900)
    assert at_work.returncode == 0, said

    begun = begun_stages(root)
    promoting = start(
        root, {**prefect_api, "DUMMY": "promote:slow"}, "run", "--name", "later", "--set", "train.beta=0.7"
    )
    wait_for(lambda: begun_stages(root)["promote"] > begun["promote"], 180)
    opened = command(root, prefect_api, "open", "later", str(folder))
    assert opened.stdout.startswith(f"later is in {folder}\n"), opened.stderr
    assert promoting.poll() is None
    said, _ = promoting.communicate(timeout=900)
    assert promoting.returncode == 0, said
    assert json.loads((folder / "data/train/out.json").read_text())["beta"] == 0.7
    assert command(root, prefect_api, "open", "later", str(folder)).returncode == 0  # the same commit


def begun_stages(root: Path) -> Counter[str]:
    return Counter((root / ".scratch" / "ran").read_text().split())


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_behind_and_is_resumed_by_name_and_not_twice(
    three: tuple[Path, str, str], prefect_api: Env
) -> None:
    root, env = three[0], {**prefect_api, "DUMMY": "train:sessions"}
    killed = start(root, fresh(env), "run", "--set", "train.beta=0.9", "--name", "e")
    pids = root / ".scratch" / "pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 3, 180)
    family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    family += psutil.Process(killed.pid).children(recursive=True)
    wait_for((root / ".scratch/runs/e/run.json").exists, 60)  # until MLflow knows it
    killed.kill()
    wait_for(lambda: not any(map(alive, family)), 40)  # some in sessions of their own, one without its parent
    killed.communicate()
    parent, pid = read(root, "e", "run.json")["run_id"], read(root, "e", "record.json")["pid"]
    assert [line.split()[:2] for line in runs(root, prefect_api) if line.startswith("e ")] == [["e", "crashed"]]
    taken = flow(root, prefect_api, "--name", "e")
    assert taken.stderr.startswith("error: There is a run named 'e' already. ")
    assert "continue it with `dpo resume e`" in taken.stderr

    again = start(root, {**prefect_api, "DUMMY": "train:slow"}, "resume", "e")
    wait_for(lambda: read(root, "e", "record.json")["pid"] != pid, 120)
    second = command(root, prefect_api, "resume", "e")
    assert second.returncode == 1
    pid = read(root, "e", "record.json")["pid"]
    assert second.stderr.startswith(f"error: The run e is running in process {pid} since ")
    said, _ = again.communicate(timeout=900)
    assert again.returncode == 0, said
    assert "source: unchanged, not run" in said
    assert read(root, "e", "run.json")["run_id"] == parent
    assert len(read(root, "e", "record.json")["flow_runs"]) == 2
    assert yaml.safe_load(git(root, "show", "runs/e:params.yaml"))["train"]["beta"] == 0.9
    over = command(root, prefect_api, "resume", "e")
    assert over.stderr.startswith("error: The run e is finished; there is nothing to resume.")


@pytest.mark.slow
def test_a_run_with_a_wrong_value_is_resumed_with_another(three: tuple[Path, str, str], prefect_api: Env) -> None:
    """The dummy stage refuses a beta above 0.4; the worktree keeps it until `--set` changes it."""
    root, _, _ = three
    env = {**prefect_api, "DUMMY": "train:user>0.4"}
    failed = command(root, env, "run", "--name", "wrong", "--set", "train.beta=0.77")
    assert failed.returncode == 1
    assert failed.stderr == (
        "error: pairs.jsonl line 3 is broken.\nMend it.\nThen `dpo resume wrong` continues the run. It keeps its "
        "values; to change one, add it: `dpo resume wrong --set train.beta=0.2`.\n"
    )
    assert failed.stdout.count("train: 1/2") == 1  # not tried again
    assert "Mend it" not in failed.stdout  # said once
    worktree = root / ".scratch/worktrees/wrong"
    assert command(root, env, "open", "wrong").stdout.startswith(
        f"wrong is in {worktree}\nIt is the worktree of an unfinished run and stays until `dpo resume wrong`"
    )
    assert "The run wrong ended (failed) before its stages were done" in command(root, env, "open", "wrong", "x").stderr
    typo = command(root, env, "resume", "wrong", "--set", "train.bta=0.2")
    assert "with overrides: Unknown key `train.bta`. Did you mean `train.beta`?" in typo.stderr
    changes = ["--set", "train.beta=0.2", "--set", "cluster.actor_train.save_steps=7"]
    done = command(root, env, "resume", "wrong", *changes)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(git(root, "show", "runs/wrong:params.yaml"))["train"]["beta"] == 0.2
    cluster = yaml.safe_load(git(root, "show", "runs/wrong:infra/overrides.yaml"))
    assert cluster == {"actor_train": {"save_steps": 7}}
    assert stored(root, "wrong", "train") == expected(root, "train", beta=0.2)


def runs(root: Path, env: Env) -> list[str]:
    return command(root, env, "runs").stdout.splitlines()


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_is_found_by_prefects_name_and_id_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "runs_folder", lambda: tmp_path)
    first = "0a1b2c3d-0000-4000-8000-000000000000"
    records.RunRecord("calm-otter-0a1b2c3d", str(tmp_path), flow_runs=[first], state="failed").write()
    for name in ("calm-otter-0a1b2c3d", "calm-otter", first):
        assert records.check_resumable(name).name == "calm-otter-0a1b2c3d"
    with pytest.raises(UserError, match="There is no run named 'otter'"):
        records.find_run("otter")
    assert records.default_name("calm-otter-0a1b2c3d", first) == "calm-otter-0a1b2c3d"  # tried again by Prefect


def test_a_record_of_another_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier one has fields that this one does not know, and lacks others."""
    monkeypatch.setattr(records, "runs_folder", lambda: tmp_path)
    write_json(tmp_path / "old/record.json", {"name": "old", "root": str(tmp_path), "state": "failed", "made": True})
    write_json(tmp_path / "broken/record.json", {"state": "failed"})
    assert records.check_resumable("old").started_with == {}
    assert [path.parent.name for path in records.damaged_records()] == ["broken"]


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        ("running", "It is running in process 1 since noon: wait until it ends, or"),
        ("crashed", "It has not finished (crashed): continue it with `dpo resume taken`, or"),
        ("failed", "It has not finished (failed): continue it with `dpo resume taken`, or"),
        ("stopped", "It has not finished (stopped): continue it with `dpo resume taken`, or"),
        ("finished", "It is finished: look at it with `dpo runs` and `dpo open`, or"),
    ],
)
def test_a_taken_name_is_refused_before_a_server_starts_with_the_advice_for_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, advice: str
) -> None:
    from flows import dpo, terminal
    from tasks.system.processes import this_process

    monkeypatch.setattr(records, "runs_folder", lambda: tmp_path)
    monkeypatch.setattr(terminal, "attached", lambda: pytest.fail("a server was started"))
    process = this_process() if state == "running" else {}
    kept = "running" if state == "crashed" else state  # a killed run leaves that state
    records.RunRecord("taken", str(tmp_path / "w"), kept, since="noon", pid=1, process=process).write()
    with pytest.raises(UserError) as error:
        dpo.run_here(name="taken")
    assert str(error.value) == f"There is a run named 'taken' already. {advice} choose another name."
    with pytest.raises(UserError, match=r"A run cannot be named 'a\.\.b'"):
        dpo.run_here(name="a..b")


def test_the_list_names_the_model_and_how_to_open_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "runs_folder", lambda: tmp_path)
    monkeypatch.setattr(background, "FOLDER", tmp_path / "no services")
    records.RunRecord("calm-otter", str(tmp_path), state="finished").write()
    write_json(tmp_path / "calm-otter/params.json", {"promote": {"model_name": "polite"}})
    ids = {"experiment_id": "1", "run_id": "ab"}
    for store, hint in (("sqlite:///mlflow.db", True), ("http://mlflow:5000", False)):
        write_json(tmp_path / "calm-otter/run.json", {**ids, "tracking_uri": store})
        status.show_runs()
        shown = capsys.readouterr().out
        assert shown.splitlines()[-1 - 2 * hint].split()[:3] == ["calm-otter", "finished", "polite"]
        assert ("The pages of MLflow open after `dpo up`" in shown) == hint


def test_a_closed_pipe_ends_a_command_without_a_traceback() -> None:
    text = "from tasks.system.commands import as_command; as_command(lambda: print('x' * 10))()"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", text], stdout=write, stderr=subprocess.PIPE, text=True, cwd=PROJECT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_one_process_may_hold_several_workspaces(tmp_path: Path) -> None:
    before = os.environ.get(TOKEN)
    with hold_workspace(tmp_path / "one") as one, hold_workspace(tmp_path / "two") as two:
        assert one != two
        assert os.environ.get(TOKEN) == before  # passed on explicitly, so that another run does not find it
        passes = start_holder(tmp_path / "one", {**os.environ, TOKEN: str(one)})
        assert passes.communicate("")[0] == "held\n"
        stranger = start_holder(tmp_path / "two", {**os.environ, TOKEN: str(one)})
        assert "is using" in stranger.communicate("")[1]
