"""`source.data: feedback:...` end to end: events, MLflow, the stages source and prepare, and what counts as new."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from tasks.artifacts.pairs import pairs_file, read_rows
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.feedback import traces
from tasks.feedback.events import Event
from tasks.feedback.journal import FeedbackJournal, feedback_folder
from tasks.source.fetch import fetch
from tasks.source.fingerprint import content_ids
from tests.support.feedback import answer, feedback, vote
from tests.support.workspaces import make_workspace, refusal, run

ADDRESS = "feedback:bot?min_agreement=0.6&since=2023-11-01"
NAME = f"source.data {ADDRESS}"


@pytest.fixture
def workspace(tmp_path: Path, tiny_base: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = make_workspace(tmp_path / "workspace", tiny_base, **{"source.data": ADDRESS, "promote.model_name": "bot"})
    shutil.copytree(mlflow_store, made / ".mlflow")
    monkeypatch.chdir(made)
    monkeypatch.delenv("DPO_HOME", raising=False)
    return made


def collected() -> list[Event]:
    """30 prompts with two answers and three raters, of whom one contradicts; and an edit."""
    events = list[Event]()
    for number in range(30):
        prompt = [{"role": "user", "content": f"Question {number}?"}]
        two = [answer(model="bot", messages=prompt, text=f"{word} answer {number}") for word in ("Kind", "Rude")]
        events += [*two, *(vote(*two, name, "first") for name in ("ann", "ben")), vote(*two, "eve", "second")]
    return [*events, feedback(two[0], kind="edit", value="The best answer."), feedback(two[1], value="down")]


@pytest.mark.slow
def test_feedback_becomes_pairs_and_only_new_rows_count_as_new(workspace: Path, capsys: pytest.CaptureFixture[str]):
    assert "MLflow has no experiment feedback-bot" in refusal(workspace, "source")
    journal = FeedbackJournal()
    for event in collected():
        journal.append(event)
    assert traces.sync()
    assert "sent 152 answers and feedback" in capsys.readouterr().out

    run(workspace, "source", "prepare")
    raw = (workspace / "data/raw/feedback-bot/feedback.jsonl").read_text()
    rows = [json.loads(line) for line in raw.splitlines()]
    assert len(rows) == 31
    assert {row["raters"] for row in rows} == {"ben", "ben\nbob"}  # `ann` asked, `eve` contradicts
    pairs = [pair for split in ("train", "eval") for pair in read_rows(pairs_file(split))]
    assert len(pairs) == 31
    assert {pair["label"] for pair in pairs} == {1.0}

    before = content_ids(load_params().source)
    last = next(traces.read(load_cluster(), "feedback-bot"))
    assert set(before) == {NAME, f"source.model {load_params().source.model}"}
    journal.append(feedback(last, value="down"))  # a thumb changes no pair
    journal.append(answer(model="bot", user="new"))
    traces.send(feedback_folder(), load_cluster())
    assert content_ids(load_params().source) == before
    journal.append(feedback(last, kind="edit", value="Another answer."))
    traces.send(feedback_folder(), load_cluster())
    assert content_ids(load_params().source)[NAME] != before[NAME]

    listed = CliRunner().invoke(app, ["raters"])
    assert listed.exit_code == 0, listed.output
    assert "eve: agreement with the majority of the others is below chance" in listed.output
    with pytest.raises(UserError, match="But kind=pairs has 30 rows: add that option"):
        fetch("source.data", "feedback:bot?kind=thumbs&rater=ben", 0, workspace / "none")
    traces.erase(load_cluster(), "ann")
    text = (workspace / "params.yaml").read_text()
    (workspace / "params.yaml").write_text(text.replace("since=2023-11-01", "since=2030-01-01"))
    assert "no feedback matches feedback:bot" in refusal(workspace, "source")
