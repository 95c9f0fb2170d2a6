"""Scheduled runs: nothing new, new data, drift, a late start.

They are real flows in a repository whose `source` and `prepare` are the real stages; the others are dummies.
"""

import json
import shutil
import subprocess
import sys
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from flows import retrain
from flows.retrain import RetrainCheck
from tasks.artifacts import demo
from tasks.config.params import load_params, overlay
from tasks.config.strict import dotted, read_yaml
from tasks.errors import UserError
from tasks.prepare.card.drift import DRIFT_METRICS, shifts
from tasks.runs.workspace import Workspace
from tasks.source.fingerprint import content_ids, content_ids_or_fail
from tasks.system.files import write_json
from tests.support.deployed import ask
from tests.support.fork_server import with_torch
from tests.support.workspaces import NO_JUDGE, PROJECT, write_data

Env = dict[str, str]
ROWS = demo.rows(0)[:200]
NOW = datetime(2026, 3, 1, 4, 0).astimezone()


def make_repo(root: Path, template: Path, model: Path) -> Path:
    """The dummy repository with real data: what it fetches and how it prepares is ours."""
    shutil.copytree(template, root, symlinks=True)
    write_data(root / "pairs.jsonl", ROWS)
    given = {"source.data": "pairs.jsonl", "source.model": str(model), **NO_JUDGE}
    (root / "params.yaml").write_text(yaml.safe_dump(overlay(read_yaml(root / "params.yaml"), dotted(given))))
    stages = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
    real = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]
    stages = {**stages, **(ours := {name: real[name] for name in ("fingerprint", "source", "sample", "prepare")})}
    stages = {name: stages[name] for name in (*ours, *(name for name in stages if name not in ours))}
    stages["reference"]["deps"] = ["data/pairs"]
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", *who, "commit", "-q", "-a", "-m", "real data"], cwd=root, check=True)
    return root


def retrain_run(root: Path, env: Env, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", "retrain", *arguments]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900)


def newest(env: Env) -> Any:
    return ask(env, "flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})[0]


def champion(root: Path) -> dict[str, str]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/.mlflow/mlflow.db")
    return {alias: str(number) for alias, number in client.get_registered_model("dpo-demo").aliases.items()}


def crown(root: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/.mlflow/mlflow.db")
    client.create_registered_model("dpo-demo")
    client.create_model_version("dpo-demo", "somewhere")
    client.set_registered_model_alias("dpo-demo", "champion", "1")


def works(root: Path) -> set[Path]:
    """Everything that a run which really works leaves behind."""
    return {*root.glob(".scratch/runs/*"), *root.glob(".scratch/worktrees/*")}


@pytest.mark.slow
def test_scheduled_runs(tmp_path: Path, dummy_template: Path, tiny_base: Path, prefect_api: Env) -> None:
    root, prefect_api = make_repo(tmp_path / "repo", dummy_template, tiny_base), with_torch(prefect_api)
    first = retrain_run(root, prefect_api)
    assert first.returncode == 0, first.stderr
    assert "the first run with this recipe" in first.stdout
    assert first.stdout.endswith("the report\n")
    crown(root)
    before = works(root)

    second = retrain_run(root, prefect_api)  # nothing new
    assert second.returncode == 0, second.stderr
    assert "retrain: nothing new since 2" in second.stdout
    assert "the report" not in second.stdout
    assert works(root) == before  # no run, no worktree, nothing in MLflow
    state = newest(prefect_api)["state"]
    assert (state["type"], state["name"]) == ("COMPLETED", "Completed")
    assert state["message"].startswith("nothing new since ")
    assert state["message"].endswith("began: the same data, model, code and params")

    longer = [{**row, "chosen": row["chosen"] * 3} for row in ROWS]
    write_data(root / "pairs.jsonl", longer)
    third = retrain_run(root, prefect_api)  # new, and not what the champion learnt from
    assert third.returncode == 1
    assert "new since 2" in third.stdout
    assert "the content of source.data pairs.jsonl" in third.stdout
    assert third.stderr.startswith("error: The data has drifted from that of ")
    assert "tokens of the chosen, mean " in third.stderr
    assert "chosen_longer " in third.stderr
    assert "reference: 1/2" not in third.stdout  # before anything expensive
    assert newest(prefect_api)["state"]["type"] == "FAILED"
    assert champion(root) == {"champion": "1"}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run on pairs.jsonl left, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(retrain, "get_run_logger", lambda: Quiet())
    write_data(tmp_path / "pairs.jsonl", ROWS[:5])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    params = overlay(
        read_yaml(PROJECT / "params.yaml"), dotted({"source.data": "pairs.jsonl", "source.model": "model"})
    )
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    (tmp_path / "code.py").write_text("a = 1\n")
    stages = {"one": {"cmd": "true", "deps": ["code.py"], "outs": ["data/one"]}}
    stages["two"] = {"cmd": "true", "deps": ["code.py", "data/one"], "outs": [{"data/two": {"persist": True}}]}
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    made = {"params": load_params().model_dump(mode="json"), "code": retrain.code_hashes(tmp_path)}
    seen = content_ids_or_fail(load_params().source)
    return {"run": "first", "began": NOW.isoformat(), **made, "fingerprint": seen, "card": None}


class Quiet:
    def info(self, *arguments: Any) -> None:
        pass

    warning = info


def check(last: dict[str, Any] | None, root: Path) -> RetrainCheck:
    params = load_params(root / "params.yaml").model_dump(mode="json")
    return RetrainCheck(params, retrain.code_hashes(root), last)


def test_what_counts_as_new(record: dict[str, Any], tmp_path: Path) -> None:
    def found() -> list[str]:
        return check(record, tmp_path).changes()

    assert set(record["code"]) == {"code.py", "dvc.yaml"}  # and nothing that a stage makes
    assert found() == []
    (tmp_path / "README.md").write_text("new")
    assert found() == []
    (tmp_path / "code.py").write_text("a = 2\n")
    assert found() == ["code (code.py)"]
    (tmp_path / "code.py").write_text("a = 1\n")
    text = (tmp_path / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(text.replace("beta: 0.1", "beta: 0.2"))
    assert found() == ["train.beta 0.1 -> 0.2"]
    (tmp_path / "params.yaml").write_text(text)
    write_data(tmp_path / "pairs.jsonl", ROWS[:6])
    (tmp_path / "model" / "config.json").write_text("{} ")
    assert found() == ["the content of source.data pairs.jsonl", "the content of source.model model"]
    (tmp_path / "pairs.jsonl").unlink()
    with pytest.raises(UserError, match=r"source\.data: there is no file pairs\.jsonl"):
        found()


def test_a_late_run_ends_if_another_run_began_after_it_was_due(record: dict[str, Any], tmp_path: Path) -> None:
    """A worker that was away for two nights finds three runs: the first works, at 04:00, for all that were due."""
    write_data(tmp_path / "pairs.jsonl", ROWS[:6])
    why = check(record, tmp_path).nothing_new(NOW - timedelta(hours=2))
    assert why is not None
    assert why.startswith("nothing new since 2026-03-01 04:00")
    assert "first began then, after this run was due (2026-03-01 02:00" in why
    assert check(record, tmp_path).nothing_new(NOW + timedelta(hours=22)) is None
    assert check(None, tmp_path).nothing_new(NOW) is None


def test_a_record_from_the_future_does_not_stop_retraining(record: dict[str, Any], tmp_path: Path) -> None:
    write_data(tmp_path / "pairs.jsonl", ROWS[:6])
    ahead = {**record, "began": "2036-03-01T04:00:00+00:00"}
    due = datetime.now().astimezone()
    assert check(ahead, tmp_path).nothing_new(due) is None  # the data are new, whatever the clock said
    write_data(tmp_path / "pairs.jsonl", ROWS[:5])
    assert check(ahead, tmp_path).nothing_new(due) is not None


def test_records_are_kept_by_recipe_and_overrides(tmp_path: Path) -> None:
    settings = [(None, None), ("demo", None), (None, {"train.beta": 0.2})]
    assert len({retrain.record_path(*setting, tmp_path) for setting in settings}) == 3
    assert retrain.record_path(None, {}, tmp_path) == retrain.record_path(None, None, tmp_path)


def card(pairs: int, chosen: float, longer: float, left_out: int, web: int) -> dict[str, Any]:
    return {
        "pairs": {"train": pairs, "eval": 0},
        "tokens": {"prompt": {"mean": 10.0}, "chosen": {"mean": chosen}, "rejected": {"mean": 20.0}},
        "by_source": {"web": {"train": web, "eval": 0}, "own": {"train": pairs - web, "eval": 0}},
        "left_out": {"duplicate": left_out},
        "shortcuts": {"chosen_longer": longer, "probe_accuracy": 0.6},
    }


def test_drift_is_measured_against_the_earlier_card() -> None:
    old, new = card(800, 20.0, 0.5, 100, 400), card(600, 25.0, 0.7, 150, 450)
    found = {shift.name: shift for shift in shifts(dict.fromkeys(DRIFT_METRICS, 0.2), old, new)}
    # 600 of 800; (25 - 20) / 20; web 400/800 -> 450/600; 100/900 -> 150/750 of the pairs; 0.5 -> 0.7
    expected = {"fewer_pairs": 0.25, "tokens": 0.25, "sources": 0.25, "left_out": 0.088889, "chosen_longer": 0.2}
    assert {name: shift.moved for name, shift in found.items()} == {**expected, "probe": 0.0}
    assert [name for name, shift in found.items() if shift.too_far] == ["fewer_pairs", "tokens", "sources"]
    assert str(found["tokens"]) == "tokens of the chosen, mean 20 -> 25 (moved by 0.25, limit 0.2)"
    new["left_out"]["not_sampled"] = 9000  # outside the sample of prepare.max_pairs: the data has grown
    assert shifts({"left_out": 0.2}, old, new)[0].moved == 0.088889
    assert not any(
        shift.too_far for shift in shifts(dict.fromkeys(DRIFT_METRICS, 0.2), old, card(1600, 20, 0.5, 0, 800))
    )


def test_another_model_or_other_data_start_a_new_drift_baseline(record: dict[str, Any], tmp_path: Path) -> None:
    """As when a user moves from the demo to data of their own: nothing drifted, there is nothing to compare with."""
    write_json(tmp_path / retrain.CARD, card(10, 90.0, 0.9, 500, 10))
    write_json(tmp_path / retrain.FINGERPRINT, {})
    workspace = Workspace(tmp_path, "second")
    last = {**record, "card": card(800, 20.0, 0.5, 100, 400), "card_of": "first"}
    assert retrain.new_baseline(last, record["params"]) is None
    for key, value in (("source.data", "own.jsonl"), ("promote.model_name", "own")):
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(overlay(record["params"], dotted({key: value}))))
        params = load_params(tmp_path / "params.yaml").model_dump(mode="json")
        assert f"{key} is {value} and was " in (retrain.new_baseline(last, params) or "")
        retrain.check_drift(workspace, last)  # does not stop
        outcome = retrain.outcome(workspace, NOW, {"code": record["code"]}, last) or {}
        assert outcome["card_of"] == "second"  # the baseline from now on, promoted or not
        assert retrain.new_baseline(outcome, params) is None
        assert retrain.new_baseline({**outcome, "params": {}}, record["params"])  # a run in between changes nothing


def test_an_unknown_drift_figure_is_rejected(tmp_path: Path) -> None:
    content = overlay(read_yaml(PROJECT / "params.yaml"), dotted({"promote.drift": {"tokns": 0.1}}))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"unknown name `tokns`\. Known names: fewer_pairs, tokens"):
        load_params(tmp_path / "params.yaml")


class Hub(BaseHTTPRequestHandler):
    """A hub that knows one data set and one model, each at a commit."""

    commit = "a" * 40

    def do_GET(self) -> None:
        body = json.dumps({"id": "owner/name", "sha": self.commit, "siblings": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_hub_address_is_new_when_its_commit_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    update = {"data": "hub:owner/name?split=train", "model": "hub:owner/name"}
    source = load_params(PROJECT / "params.yaml").source.model_copy(update=update)
    first = {"source.data hub:owner/name?split=train": "a" * 40, "source.model hub:owner/name": "a" * 40}
    second = dict.fromkeys(first, "b" * 40)
    assert content_ids(source) == {}  # never reached: `source` runs, and says what is wrong
    assert content_ids(source, known=first) == first  # of a clone: what the files that it pulled were made from
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        assert content_ids_or_fail(source) == content_ids(source) == first
        monkeypatch.setattr(Hub, "commit", "b" * 40)
        assert content_ids(source, known=first) == second
        pinned = dict.fromkeys(update, f"hub:owner/name@{'a' * 40}")
        assert content_ids_or_fail(source.model_copy(update=pinned)) == {}  # named by its content
    finally:
        server.shutdown()
        server.server_close()
    said: list[str] = []
    assert content_ids(source, known=first, warn=said.append) == second  # out of reach: no reason to run again
    assert "source.model: could not check whether hub:owner/name is new" in said[1]
    with pytest.raises(UserError, match=r"could not check whether .* is new"):
        content_ids_or_fail(source)  # but a schedule says so
