"""A schedule's nights: nothing new, new data, drift, a broken contract, a late start.

The nights are real flows in a repository whose `source` and `prepare` are the real stages; the others take no time.
"""

import json
import subprocess
import sys
import urllib.request
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from flows import retrain
from flows.workspace import Workspace
from tasks.dataset import demo
from tasks.dataset.drift import FIGURES, shifts
from tasks.errors import UserError
from tasks.files import write_json
from tasks.params import dotted, load_params, overlay, read_yaml
from tasks.watch import look, look_strictly
from tests.workspaces import PROJECT, write_data

Env = dict[str, str]
ROWS = demo.rows(0)[:200]
NOW = datetime(2026, 3, 1, 4, 0).astimezone()


def make_repo(root: Path, store: Path, model: Path) -> Path:
    """The dummy repository with real data: what it fetches and how it prepares is ours."""
    from tests.conftest import make_dummy_repo

    make_dummy_repo(root, store)
    write_data(root / "pairs.jsonl", ROWS)
    given = {"source.data": "pairs.jsonl", "source.model": str(model)}
    (root / "params.yaml").write_text(yaml.safe_dump(overlay(read_yaml(root / "params.yaml"), dotted(given))))
    stages = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
    real = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]
    stages |= {name: real[name] for name in ("watch", "source", "prepare")}
    stages["reference"]["deps"] = ["data/pairs"]
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", *who, "commit", "-q", "-a", "-m", "real data"], cwd=root, check=True)
    return root


def night(root: Path, env: Env, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.dpo", "--only-if-new", *arguments]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=600)


def newest(env: Env) -> Any:
    body = json.dumps({"sort": "START_TIME_DESC", "limit": 1}).encode()
    url = f"{env['PREFECT_API_URL']}/flow_runs/filter"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})))[0]


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
def test_four_nights(tmp_path: Path, mlflow_store: Path, tiny_base: Path, prefect_api: Env) -> None:
    root = make_repo(tmp_path / "repo", mlflow_store, tiny_base)
    first = night(root, prefect_api)
    assert first.returncode == 0, first.stderr
    assert "the first run of its kind" in first.stdout
    assert first.stdout.endswith("the report\n")
    crown(root)
    before = works(root)

    second = night(root, prefect_api)  # nothing new
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
    third = night(root, prefect_api)  # new, and not what the champion learnt from
    assert third.returncode == 1
    assert "new since 2" in third.stdout
    assert "the content of source.data pairs.jsonl" in third.stdout
    assert third.stderr.startswith("error: The data have drifted from those of ")
    assert "tokens of the chosen, mean " in third.stderr
    assert "chosen_longer " in third.stderr
    assert "reference: 1/2" not in third.stdout  # before anything expensive
    assert newest(prefect_api)["state"]["type"] == "FAILED"

    write_data(root / "pairs.jsonl", [{**row, "rejected": row["chosen"]} for row in ROWS])
    fourth = night(root, prefect_api)  # breaks the contract
    assert fourth.returncode == 1
    assert "equal_answers" in fourth.stderr
    assert "Traceback" not in fourth.stderr
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
    made, seen = retrain.made_of({}, tmp_path), look_strictly(load_params().source)
    return {"run": "first", "began": NOW.isoformat(), **made, "watch": seen, "card": None}


class Quiet:
    def info(self, *arguments: Any) -> None:
        pass

    warning = info


def test_what_counts_as_new(record: dict[str, Any], tmp_path: Path) -> None:
    def found() -> list[str]:
        return retrain.news(last=record, now=retrain.made_of({}, tmp_path))

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


def test_a_late_run_whose_work_is_done_ends_though_the_data_are_new(record: dict[str, Any], tmp_path: Path) -> None:
    """A worker that was away for two nights finds three runs: the first works, at 04:00, for all that were due."""
    write_data(tmp_path / "pairs.jsonl", ROWS[:6])
    now = retrain.made_of({}, tmp_path)
    why = retrain.nothing_new(last=record, now=now, due=NOW - timedelta(hours=2))
    assert why is not None
    assert why.startswith("nothing new since 2026-03-01 04:00")
    assert "first began then, after this run was due (2026-03-01 02:00" in why
    assert retrain.nothing_new(last=record, now=now, due=NOW + timedelta(hours=22)) is None
    assert retrain.nothing_new(last=None, now=now, due=NOW) is None


def test_a_clock_that_was_ahead_does_not_silence_retraining(record: dict[str, Any], tmp_path: Path) -> None:
    write_data(tmp_path / "pairs.jsonl", ROWS[:6])
    now, ahead = retrain.made_of({}, tmp_path), {**record, "began": "2036-03-01T04:00:00+00:00"}
    due = datetime.now().astimezone()
    assert retrain.nothing_new(last=ahead, now=now, due=due) is None  # the data are new, whatever the clock said
    write_data(tmp_path / "pairs.jsonl", ROWS[:5])
    assert retrain.nothing_new(last=ahead, now=retrain.made_of({}, tmp_path), due=due) is not None


def test_records_are_kept_by_recipe_and_overrides(tmp_path: Path) -> None:
    asked = [(None, None), ("demo", None), (None, {"train.beta": 0.2})]
    assert len({retrain.record_of(*one, tmp_path) for one in asked}) == 3
    assert retrain.record_of(None, {}, tmp_path) == retrain.record_of(None, None, tmp_path)


def card(pairs: int, chosen: float, longer: float, left_out: int, web: int) -> dict[str, Any]:
    return {
        "rows": 1000,
        "pairs": {"train": pairs, "eval": 0},
        "tokens": {"prompt": {"mean": 10.0}, "chosen": {"mean": chosen}, "rejected": {"mean": 20.0}},
        "by_source": {"web": {"train": web, "eval": 0}, "own": {"train": pairs - web, "eval": 0}},
        "left_out": {"duplicate": left_out},
        "shortcuts": {"chosen_longer": longer, "probe_accuracy": 0.6},
    }


def test_drift_is_measured_against_the_earlier_card() -> None:
    old, new = card(800, 20.0, 0.5, 100, 400), card(600, 25.0, 0.7, 150, 450)
    found = {shift.name: shift for shift in shifts(dict.fromkeys(FIGURES, 0.2), old, new)}
    # 600 of 800; (25 - 20) / 20; web 400/800 -> 450/600; 10% -> 15% of the rows; 0.5 -> 0.7
    expected = {"fewer_pairs": 0.25, "tokens": 0.25, "sources": 0.25, "left_out": 0.05, "chosen_longer": 0.2}
    assert {name: shift.moved for name, shift in found.items()} == {**expected, "probe": 0.0}
    assert [name for name, shift in found.items() if shift.too_far] == ["fewer_pairs", "tokens", "sources"]
    assert str(found["tokens"]) == "tokens of the chosen, mean 20 -> 25 (0.25, and 0.2 is allowed)"
    assert not any(shift.too_far for shift in shifts(dict.fromkeys(FIGURES, 0.2), old, card(1600, 20, 0.5, 0, 800)))


def test_another_model_or_other_data_start_a_new_baseline(record: dict[str, Any], tmp_path: Path) -> None:
    """As when a user moves from the demo to data of their own: nothing drifted, there is nothing to compare with."""
    write_json(tmp_path / retrain.CARD, card(10, 90.0, 0.9, 500, 10))
    write_json(tmp_path / retrain.WATCH, {})
    place = Workspace(tmp_path, "second")
    last = {**record, "card": card(800, 20.0, 0.5, 100, 400), "card_of": "first"}
    assert retrain.other_baseline(last, record["params"]) is None
    for key, value in (("source.data", "own.jsonl"), ("promote.model_name", "own")):
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(overlay(record["params"], dotted({key: value}))))
        now = retrain.made_of({}, tmp_path)
        assert f"{key} is {value} and was " in (retrain.other_baseline(last, now["params"]) or "")
        retrain.check_drift(place, last)  # does not stop
        left = retrain.outcome(place, NOW, now=now, last=last) or {}
        assert left["card_of"] == "second"  # the measure from now on, promoted or not
        assert retrain.other_baseline(left, now["params"]) is None
        assert retrain.other_baseline({**left, "params": {}}, record["params"])  # a run in between changes nothing


def test_a_figure_that_is_none_is_refused(tmp_path: Path) -> None:
    content = overlay(read_yaml(PROJECT / "params.yaml"), dotted({"promote.drift": {"tokns": 0.1}}))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"there is no `tokns`\. Known here: fewer_pairs, tokens"):
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


def test_a_hub_address_is_as_new_as_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    update = {"data": "hub:owner/name?split=train", "model": "hub:owner/name"}
    source = load_params(PROJECT / "params.yaml").source.model_copy(update=update)
    first = {"source.data hub:owner/name?split=train": "a" * 40, "source.model hub:owner/name": "a" * 40}
    second = dict.fromkeys(first, "b" * 40)
    assert look(source) == {}  # never reached: `source` runs, and says what is wrong
    assert look(source, known=first) == first  # of a clone: what the files that it pulled were made from
    server = HTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        assert look_strictly(source) == look(source) == first
        monkeypatch.setattr(Hub, "commit", "b" * 40)
        assert look(source, known=first) == second
        pinned = dict.fromkeys(update, f"hub:owner/name@{'a' * 40}")
        assert look_strictly(source.model_copy(update=pinned)) == {}  # named by its content
    finally:
        server.shutdown()
        server.server_close()
    said: list[str] = []
    assert look(source, known=first, say=said.append) == second  # out of reach: no reason to run again
    assert "source.model: hub:owner/name could not be asked whether it is new" in said[1]
    with pytest.raises(UserError, match="could not be asked whether it is new"):
        look_strictly(source)  # but a schedule says so
