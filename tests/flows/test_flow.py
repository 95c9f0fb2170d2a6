"""The flow `dpo` as a command, on real Prefect servers, with dummy stages (dummy_stage.py)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cli.main import app
from flows import artifacts
from tasks.artifacts.evaluation import HEADLINE_METRICS
from tasks.config.paths import METRICS, ROOT
from tasks.config.strict import parse_overrides
from tasks.errors import UserError
from tasks.reports.summary import RunSummary
from tasks.runs import run_config, search_space
from tasks.system.files import read_json, write_json
from tasks.system.lock import workspace_lock
from tests.support.browser import browser
from tests.support.deployed import ask
from tests.support.fork_server import fresh
from tests.support.workspaces import wait_for

STAGES = ["source", "prepare", "reference", "train", "evaluate", "export"]
ALWAYS = {"promote": "ran"}  # DVC cannot know which version is champion
Env = dict[str, str]


def flow(root: Path, env: Env, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", "run", *arguments]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900)


def states(root: Path) -> dict[str, str]:
    """Of the newest run, by stage."""
    newest = max((root / ".scratch" / "runs").glob("*/stages.json"), key=lambda path: path.stat().st_mtime_ns)
    return {entry["stage"]: entry["state"] for entry in json.loads(newest.read_text())}


def set_beta(root: Path, beta: float) -> None:
    path = root / "params.yaml"
    path.write_text(re.sub(r"(?m)^  beta: \S+", f"  beta: {beta}", path.read_text()))


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def flow_run(root: Path, env: Env) -> dict[str, Any]:
    """Prefect's record of the newest run, whose folder has its name."""
    newest = max((root / ".scratch" / "runs").glob("*/stages.json"), key=lambda path: path.stat().st_mtime_ns)
    (run,) = ask(env, "flow_runs/filter", {"flow_runs": {"name": {"any_": [newest.parent.name]}}})
    return dict(run)


def task_runs(run: dict[str, Any], env: Env) -> list[dict[str, Any]]:
    return list(ask(env, "task_runs/filter", {"task_runs": {"flow_run_id": {"any_": [run["id"]]}}}))


def newest_artifacts(root: Path, env: Env) -> dict[str, Any]:
    """The newest artifact of each key, of the newest run."""
    of_run = {"artifacts": {"flow_run_id": {"any_": [flow_run(root, env)["id"]]}}}
    found: dict[str, Any] = {}
    for artifact in ask(env, "artifacts/filter", {"sort": "CREATED_DESC", **of_run}):
        found.setdefault(artifact["key"], artifact["data"])
    return found


@pytest.fixture(scope="session")
def done_once(tmp_path_factory: pytest.TempPathFactory, prefect_api: Env, dummy_template: Path) -> Path:
    """A repository in which the whole pipeline has run, committed; `train` crashed once. `printed` has the output.

    A run before it, `failed`, ended because `train` kept crashing.
    """
    root = Path(shutil.copytree(dummy_template, tmp_path_factory.mktemp("done") / "repo", symlinks=True))
    failed = flow(root, {**prefect_api, "DUMMY": "train:crash"})
    assert failed.returncode == 1
    (root.parent / "failed.json").write_text(json.dumps([flow_run(root, prefect_api), failed.stdout, failed.stderr]))
    (root / ".scratch" / "crashed").unlink()
    done = flow(root, {**prefect_api, "DUMMY": "train:once"})
    assert done.returncode == 0, done.stderr
    (root.parent / "printed").write_text(done.stdout)
    git(root, "add", "-A")
    git(root, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-q", "-m", "ran")
    return root


@pytest.fixture
def repo(done_once: Path, tmp_path: Path) -> Path:
    """A copy in which train, evaluate and what follows must run again."""
    root = shutil.copytree(done_once, tmp_path / "repo", symlinks=True)
    set_beta(root, 0.3)
    return root


@pytest.mark.slow
def test_a_crashed_stage_is_retried_and_the_run_shows_its_stages(done_once: Path, prefect_api: Env) -> None:
    printed = (done_once.parent / "printed").read_text()
    assert "train: failed, trying again. The stage train failed with exit code 1." in printed
    assert printed.endswith("the report\n")
    earlier = dict.fromkeys(STAGES[:3], "cached")  # from the run that failed
    assert states(done_once) == dict.fromkeys(STAGES, "ran") | earlier | ALWAYS
    run = flow_run(done_once, prefect_api)
    tasks = task_runs(run, prefect_api)
    cached = dict.fromkeys(STAGES[:3], "Cached")
    every = [*STAGES, "promote"]
    assert {task["name"]: task["state_name"] for task in tasks} == dict.fromkeys(every, "Completed") | cached
    links = ask(prefect_api, "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    links = [artifact for artifact in links if artifact["key"] == "dpo-links"]
    assert min(link["created"] for link in links) < min(task["start_time"] for task in tasks)  # before any stage
    ids = json.loads((done_once / ".scratch" / "runs" / run["name"] / "run.json").read_text())
    last = max(links, key=lambda link: link["created"])["data"]
    assert f"/#/experiments/1/runs/{ids['run_id']}?workflowType=machine_learning)" in last
    assert f"/runs/{ids['run_id']}/artifacts/report.html?" in last
    nodes = dict(ask(prefect_api, f"flow_runs/{run['id']}/graph-v2")["nodes"])
    edges = {node["label"]: {nodes[parent["id"]]["label"] for parent in node["parents"]} for node in nodes.values()}
    assert edges == {stage: {before} for before, stage in pairwise(every)} | {every[0]: set()}


@pytest.mark.slow
def test_a_stage_that_keeps_crashing_fails_the_run_with_one_message(done_once: Path, prefect_api: Env) -> None:
    run, stdout, stderr = json.loads((done_once.parent / "failed.json").read_text())
    assert stderr.startswith("error: The stage train failed with exit code 1. Its last line: the worker is gone\n")
    assert "Traceback" not in stdout + stderr
    assert stdout.count("train: 1/2") == 3
    completed = dict.fromkeys(STAGES[:3], "Completed")
    found = {task["name"]: task["state_name"] for task in task_runs(run, prefect_api)}
    assert found == {**completed, "train": "Failed"}


@pytest.mark.slow
def test_overrides_run_in_a_worktree_and_leave_the_checkout_alone(repo: Path, prefect_api: Env) -> None:
    """It also waits for an approval that nobody gives."""
    set_beta(repo, 0.1)  # as committed
    before = git(repo, "status", "--porcelain"), (repo / "dvc.lock").read_text()
    changes = ["--set", "train.beta=0.7", "--set", "promote.approval_hours=0.001"]
    done = flow(repo, {**prefect_api, "DUMMY": "promote:wait"}, *changes, "--name", "high-beta")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"nobody answered in time; `dpo approve \S+/7 NAME` still approves the version", done.stdout)
    assert flow_run(repo, prefect_api)["state_type"] == "COMPLETED"
    assert (git(repo, "status", "--porcelain"), (repo / "dvc.lock").read_text()) == before
    assert states(repo) == {**dict.fromkeys(STAGES[:3], "cached"), **states(repo), "train": "ran", "evaluate": "ran"}
    committed = yaml.safe_load(git(repo, "show", "runs/high-beta:params.yaml"))
    assert committed["train"]["beta"] == 0.7
    assert "beta: 0.7" in git(repo, "show", "runs/high-beta:dvc.lock")
    assert not (repo / ".scratch" / "worktrees" / "high-beta").exists()  # the branch and the cache have it all
    said = newest_artifacts(repo, prefect_api)["dpo-result"]
    assert "worktrees" not in said
    assert "`dpo open high-beta` checks it out" in said
    assert str(repo / ".scratch" / "runs" / "high-beta" / "results") in said
    assert "worktrees" not in (repo / ".scratch" / "runs" / "high-beta" / "report.html").read_text()

    for env, same in ((prefect_api, True), ({**prefect_api, "DUMMY": "train:drift"}, False)):
        once_more = [sys.executable, "-m", "cli", "reproduce", "high-beta"]
        repeated = subprocess.run(once_more, cwd=repo, env=env, capture_output=True, text=True)
        assert ("every metric is identical" in repeated.stdout) == same, repeated.stderr
        assert ("high-beta did not reproduce:\ndata/train (stage train)" in repeated.stderr) != same
        assert repeated.returncode == (0 if same else 1)


COUNTED = """
from flows import dpo, retrain
from tasks.runs import run_config
calls = []
def count(module, name):
    function = getattr(module, name)
    setattr(module, name, lambda *given, **named: (calls.append(name), function(*given, **named))[1])
for module, name in ((run_config, "resolve"), (retrain, "nothing_new"), (retrain, "check_drift")):
    count(module, name)
dpo.run_here(overrides={"train.beta": 0.8, "cluster.actor_train.save_steps": 9}, name="counted")
print(calls)
"""


@pytest.mark.slow
def test_a_run_resolves_its_configuration_once_and_does_what_only_retraining_needs_for_the_next_alone(
    repo: Path, prefect_api: Env
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], cwd=repo, env=fresh(prefect_api), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['resolve']"
    started_with = json.loads((repo / ".scratch/runs/counted/record.json").read_text())["started_with"]
    assert started_with["overrides"] == {"train.beta": 0.8, "cluster.actor_train.save_steps": 9}
    (left,) = (path for path in (repo / ".scratch/retrain").glob("*.json") if "counted" in path.read_text())
    assert json.loads(left.read_text())["code"] == started_with["code"]  # a retraining is compared with it
    assert yaml.safe_load(git(repo, "show", "runs/counted:infra/overrides.yaml")) == {"actor_train": {"save_steps": 9}}


@pytest.mark.slow
def test_prefects_pages_show_the_run_and_execute_no_text_of_the_data(
    done_once: Path, prefect_api: Env, tmp_path: Path
) -> None:
    """In real Chromium: the flow run with its tasks, and the result with the hostile sample of dummy_stage.py."""
    run = flow_run(done_once, prefect_api)
    name = run["name"]
    pages = prefect_api["PREFECT_API_URL"].removesuffix("/api")
    with browser(tmp_path / "profile") as page:
        page.open(pages)
        page.until("document.readyState", "complete")
        page.evaluate(f"localStorage.setItem('prefect-password', btoa('{prefect_api['PREFECT_API_AUTH_STRING']}'))")
        page.open(f"{pages}/runs/flow-run/{run['id']}")
        page.shows(name, "Completed", "train", "promote", "Artifacts")
        page.picture(tmp_path / "run.png")
        page.click("Artifacts")
        page.shows("dpo-links", "dpo-result", "dpo-stages", "dpo-report")
        of_this_run = {"artifacts": {"flow_run_id": {"any_": [run["id"]]}, "key": {"any_": ["dpo-result"]}}}
        (result,) = ask(prefect_api, "artifacts/filter", of_this_run)
        page.open(f"{pages}/artifacts/artifact/{result['id']}")
        page.shows("prefers the chosen answer", "<script>alert(1)</script> [a](http://b.c) | x")
        page.picture(tmp_path / "result.png")
        assert page.evaluate("[...document.querySelectorAll('a')].filter(a => a.href.includes('b.c')).length") == 0
        assert page.evaluate("[...document.querySelectorAll('main script, main img')].length") == 0


@pytest.mark.slow
def test_the_result_is_published_with_its_text_escaped(done_once: Path, prefect_api: Env) -> None:
    from mlflow import MlflowClient

    found = newest_artifacts(done_once, prefect_api)
    run = read_json(done_once / ".scratch" / "runs" / flow_run(done_once, prefect_api)["name"] / "run.json")
    tags = MlflowClient(f"sqlite:///{done_once}/.mlflow/mlflow.db").get_run(run["run_id"]).data.tags
    assert found["dpo-result"].startswith(f"# Result\n\n{tags['mlflow.note.content']}\n\n")
    assert [row["stage"] for row in json.loads(found["dpo-stages"])] == [*STAGES, "promote"]
    assert "| kind | 0.5 | 0.97 |" in found["dpo-result"]
    assert "| prefers the chosen answer | 0.98 | " in found["dpo-result"]
    assert "<script>" not in found["dpo-result"]
    assert "\\<script\\>alert(1)" in found["dpo-result"]
    assert "](http://b.c" not in found["dpo-result"]
    assert "not promoted, because rewards" in found["dpo-result"]  # a gate that fails is a finished flow
    assert "below \\<0.9\\>" in found["dpo-result"]


@pytest.mark.slow
def test_manual_approval_in_prefect(repo: Path, prefect_api: Env) -> None:
    set_beta(repo, 0.1)  # as committed: no stage before promote runs again
    env = {**prefect_api, "DUMMY": "promote:wait"}
    command = [sys.executable, "-m", "cli", "run", "--set", "promote.approval_hours=0.1", "--name", "asks"]
    with subprocess.Popen(command, cwd=repo, env=env, stdout=subprocess.PIPE, text=True) as run:
        wait_for(lambda: paused(env), 120)
        with workspace_lock(repo / ".scratch" / "worktrees" / "asks"):
            pass  # nobody is kept from working meanwhile
        ask(env, f"flow_runs/{paused(env)[0]['id']}/resume", {"run_input": {"approve": True, "your_name": "Ada"}})
        said, _ = run.communicate(timeout=900)
    assert run.returncode == 0
    assert "approve: version 7 by Ada" in said


def paused(env: Env) -> list[dict[str, Any]]:
    return ask(env, "flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["PAUSED"]}}}})


@pytest.mark.slow
def test_nothing_outlives_a_run_stopped_by_ctrl_c_and_the_same_command_completes_it(repo: Path, by_hand: Env) -> None:
    """With an embedded server."""
    stop(repo, fresh({**by_hand, "DUMMY": "train:sleep"}), signal.SIGINT)
    done = flow(repo, by_hand)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("the report\n")
    assert states(repo) == dict.fromkeys(STAGES, "ran") | dict.fromkeys(STAGES[:3], "cached") | ALWAYS
    assert [line for line in done.stdout.splitlines() if "not run" in line] == [
        f"{stage}: unchanged, not run" for stage in STAGES[:3]
    ]
    status = subprocess.run([sys.executable, "-m", "dvc", "status"], cwd=repo, capture_output=True, text=True)
    assert status.stdout.split() == ["fingerprint:", "always", "changed"]  # and nothing else
    assert git(repo, "branch", "--list").split() == ["*", "main"]  # in place: git is not touched


@pytest.mark.slow
@pytest.mark.exhaustive  # test_rounds.py ends a run by SIGTERM, too: its guard does, when the rounds are killed
def test_nothing_outlives_a_terminated_run(repo: Path, prefect_api: Env) -> None:
    stop(repo, fresh({**prefect_api, "DUMMY": "train:sleep"}), signal.SIGTERM)


def stop(repo: Path, env: Env, sign: signal.Signals) -> None:
    """Start a run, send its process group a signal while a stage sleeps, and check that all its processes end."""
    printed = repo.parent / "printed"
    with printed.open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "cli", "run"],
            cwd=repo,
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # Whoever runs tests in the background has Ctrl-C switched off, and we would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        wait_for(lambda: (repo / ".scratch" / "pids").exists() or run.poll() is not None, 240)
        assert run.poll() is None, printed.read_text()
        below = psutil.Process(run.pid).children(recursive=True)
        server = ["uvicorn" in process.cmdline() for process in below]
        assert sum(server) == ("PREFECT_API_URL" not in env)
        assert len(below) >= 4 + sum(server)  # dvc, the stage, its child, and what guards them
        os.killpg(run.pid, sign)  # as Ctrl-C does
        run.wait(timeout=900)
        wait_for(lambda: not any(map(alive, below)), 40)
    except AssertionError as error:
        raise AssertionError(f"{error}; the run printed:\n{printed.read_text()}") from error
    finally:
        run.kill()
        run.wait()
    with workspace_lock(repo):
        pass  # and the workspace is free


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_second_run_of_one_workspace_is_refused(repo: Path, prefect_api: Env) -> None:
    with workspace_lock(repo):
        done = flow(repo, prefect_api)  # not a child that inherits the token: prefect_api's environment is older
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: Process {os.getpid()} on ")
    assert "dpo resume" not in done.stderr  # for runs in worktrees
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "train.bta=1"], "Unknown key `train.bta`. Did you mean `train.beta`?"),
        (["--set", "train.learning_rate='5e-7'"], "Write 5.0e-07."),
        (["--set", "train.beta"], "--set takes KEY=VALUE"),
        (["--recipe", "nope"], "There is no recipe 'nope'"),
    ],
)
def test_a_mistake_in_the_command_is_one_message(arguments: list[str], sentence: str) -> None:
    with pytest.raises((UserError, SystemExit)) as refusal:
        app(["run", *arguments], standalone_mode=False)
    assert sentence in str(refusal.value)


def test_a_mistake_is_reported_before_anything_starts(dummy_repo: Path, by_hand: Env) -> None:
    done = flow(dummy_repo, by_hand, "--set", "train.bta=1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: params.yaml with overrides: Unknown key `train.bta`.")
    assert "Traceback" not in done.stderr


def test_overrides_that_change_nothing_need_no_worktree() -> None:
    assert run_config.resolve(None, None).files == {}
    beta = yaml.safe_load((ROOT / "params.yaml").read_text())["train"]["beta"]
    assert run_config.resolve(None, {"train.beta": beta}).files == {}
    other = run_config.resolve(None, {"train.beta": beta + 1}).files
    assert list(other) == ["params.yaml"]
    assert other["params.yaml"]["train"]["beta"] == beta + 1


def test_a_recipe_lays_over_both_files() -> None:
    files = run_config.resolve("qwen2.5-7b-lora-zero3", {"train.beta": 0.3}).files
    assert files["infra/overrides.yaml"]["actor_train"]["zero_stage"] == 3
    assert files["params.yaml"]["train"]["beta"] == 0.3


def test_the_result_begins_with_at_most_eight_figures(tmp_path: Path) -> None:
    bounds = {"low": 0.7, "high": 0.8}
    metrics = {**{f"loss/{n}": 0.5 for n in range(30)}, "win_rate": {"rate": 0.75, **bounds}, "kl/answers": 0.3}
    write_json(tmp_path / METRICS / "evaluate.json", metrics)
    run = RunSummary("one", tmp_path)
    lines = artifacts.description(run).splitlines()
    assert lines[-2:] == [
        "| win rate vs. base model | 0.75 | 0.7 to 0.8 |",
        "| KL to the base model, nats per answer | 0.3 |  |",
    ]
    assert len(HEADLINE_METRICS) == 8
    assert artifacts._other_metrics(run).count("| loss/") == 30


def test_override_values_are_yaml() -> None:
    assert parse_overrides(["train.loss={ipo: 1.0}"]) == {"train.loss": {"ipo": 1.0}}
    assert parse_overrides(["train.max_steps=null"]) == {"train.max_steps": None}
    for number in (
        "1e-5",
        "1E-5",
        "0.1e-4",
        ".1e-4",
        "10e-06",
        "1.0e-5",
        "+1e-5",
    ):  # most are text to PyYAML
        assert parse_overrides([f"train.learning_rate={number}"]) == {"train.learning_rate": 1e-5}
        assert parse_overrides([f"train.loss={{ipo: {number}}}"]) == {"train.loss": {"ipo": 1e-5}}
        assert search_space.parse(f"train.learning_rate={number},2e-5") == ("train.learning_rate", [1e-5, 2e-5])
    for text in ("e5", "1e", "12e5f", "'1e5'", "1e5-small", "v1e5"):
        assert parse_overrides([f"promote.model_name={text}"]) == {"promote.model_name": text.strip("'")}
    assert parse_overrides(["source.data=feedback:"]) == {"source.data": "feedback:"}
    with pytest.raises(UserError, match="not valid YAML"):
        parse_overrides(["train.loss={"])


@pytest.mark.parametrize(
    "text",
    ["<b>x</b>", "[a](javascript:b)", "![i](http://x.y)", "a | b", "*a* _b_ `c`", "www.x.org", "\u202eevil\n# h"],
)
def test_escaped_text_contains_no_markdown(text: str) -> None:
    shown = re.sub(r"\\[^a-zA-Z0-9\s]", "", artifacts.escape(text))  # what stands behind a backslash is only shown
    assert not re.search(r"[<>\[\]|*`\u202e\n\\]|\b_|_\b|://|www\.", shown)
