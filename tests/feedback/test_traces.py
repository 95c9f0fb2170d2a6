"""Answers and feedback reach MLflow once each, come back as they were, and can be erased."""

import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.config.cluster import Cluster, load_cluster
from tasks.errors import UserError
from tasks.feedback.events import Answer, Event, Feedback
from tasks.feedback.journal import FeedbackJournal, read_events
from tasks.tracking import traces
from tests.support.workspaces import wait_for

NOW = 1_700_000_000.125
At = Callable[[str], Cluster]


def new_id() -> str:
    return uuid.uuid4().hex


def answer(**over: Any) -> Answer:
    fields = {
        "id": new_id(),
        "time": NOW,
        "messages": [{"role": "user", "content": "Wie heißt Du? 🙂"}],
        "text": "Ich heiße Bot.",
        "model": "m",
        "version": "3",
        "run": "20261101-quiet-fox",
        "role": "champion",
        "user": "ann",
        "parameters": {"temperature": 0.7, "max_tokens": 64},
    }
    return Answer(**{**fields, **over})


def feedback(on: Answer, **over: Any) -> Feedback:
    fields = {"id": new_id(), "time": NOW + 1, "answer": on.id, "rater": "bob", "kind": "thumb", "value": "up"}
    return Feedback(**{**fields, **over})


def written(folder: Path, *events: Event) -> FeedbackJournal:
    journal = FeedbackJournal(folder)
    for event in events:
        journal.append(event)
    return journal


@pytest.fixture(params=["sqlite", "server"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Cluster:
    if request.param == "server":
        return load_cluster().model_copy(update={"tracking_uri": request.getfixturevalue("mlflow_server")})
    shutil.copytree(request.getfixturevalue("mlflow_store"), tmp_path / "mlflow")
    return load_cluster().model_copy(update={"tracking_uri": f"sqlite:///{tmp_path}/mlflow/mlflow.db"})


def found(cluster: Cluster, model: str) -> list[Event]:
    return sorted(traces.read(cluster, traces.experiment_name(model)), key=lambda event: event.id)


def by_id(*events: Event) -> list[Event]:
    return sorted(events, key=lambda event: event.id)


def test_events_come_back_as_they_were_and_sending_again_adds_nothing(cluster: Cluster, tmp_path: Path):
    model, folder = f"m-{new_id()[:8]}", tmp_path / "journal"
    one, two = answer(model=model), answer(model=model, text="", user="", version="", run="")
    events = [one, two, feedback(one), feedback(one, kind="edit", value="Ich bin Bot."), feedback(two, rater="eve")]
    events.append(feedback(one, kind="preference", value="second", other=two.id))
    journal = written(folder, *events)
    assert traces.send(folder, cluster) == 6
    assert found(cluster, model) == by_id(*events)
    assert traces.send(folder, cluster) == 0
    (folder / traces.SENT).unlink()  # as if the sender had been killed before it noted what it sent
    late = feedback(two, rater="ida", value="down")
    journal.append(late)
    traces.send(folder, cluster)
    assert found(cluster, model) == by_id(*events, late)
    kinds = [type(event) for event in traces.read(cluster, traces.experiment_name(model))]
    assert kinds == [Answer] * 2 + [Feedback] * 5
