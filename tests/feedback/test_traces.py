"""Answers and feedback reach MLflow once each, come back as they were, and can be erased."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from tasks.config.cluster import Cluster, load_cluster
from tasks.errors import UserError
from tasks.feedback import traces
from tasks.feedback.events import Answer, Event, Feedback
from tests.support.feedback import NOW, answer, feedback, new_id, vote, written
from tests.support.mlflow_logins import VARIABLES, mlflow_with_logins
from tests.support.workspaces import wait_for


@pytest.fixture(params=["sqlite", pytest.param("server", marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Cluster:
    if request.param == "server":
        return at(request.getfixturevalue("mlflow_server"))
    shutil.copytree(request.getfixturevalue("mlflow_store"), tmp_path / "mlflow")
    return at(f"sqlite:///{tmp_path}/mlflow/mlflow.db")


@pytest.fixture
def model() -> str:
    return f"m-{new_id()[:8]}"


def at(address: str) -> Cluster:
    return load_cluster().model_copy(update={"tracking_uri": address})


def found(cluster: Cluster, model: str) -> list[Event]:
    return by_id(*traces.read(cluster, traces.experiment_name(model)))


def by_id(*events: Event) -> list[Event]:
    return sorted(events, key=lambda event: event.id)


def test_events_come_back_as_they_were_and_sending_again_adds_nothing(cluster: Cluster, model: str, tmp_path: Path):
    folder = tmp_path / "journal"
    one, two = answer(model=model), answer(model=model, text="", user="", version="", run="", parameters={})
    events = [one, two, feedback(one), feedback(one, kind="edit", value="Ich bin Bot."), feedback(two, rater="eve")]
    journal = written(folder, *events, last := vote(one, two, "bob", "second"))
    assert traces.send(folder, cluster) == 6
    assert found(cluster, model) == by_id(*events, last)
    assert traces.send(folder, cluster) == 0
    (folder / traces.SENT).unlink()  # as if the sender had been killed before it noted what it sent
    journal.append(late := feedback(two, rater="ida", value="down"))
    traces.send(folder, cluster)
    assert found(cluster, model) == by_id(*events, last, late)
    kinds = [type(event) for event in traces.read(cluster, traces.experiment_name(model))]
    assert kinds == [Answer] * 2 + [Feedback] * 5


def test_feedback_waits_for_its_answer_and_sent_journals_are_deleted(cluster: Cluster, model: str, tmp_path: Path):
    folder, other = tmp_path / "journal", tmp_path / "other machine"
    one = answer(model=model)
    early, stale = feedback(one, time=2e9), feedback(answer(), time=NOW)  # of an answer that never comes
    kept = written(folder, early, stale)
    assert traces.send(folder, cluster) == 1  # the stale one is given up
    written(other, one)
    traces.send(other, cluster)
    assert list(other.glob("*.jsonl")) == []  # sent, and its writer is gone
    assert traces.send(folder, cluster) == 1
    assert found(cluster, model) == by_id(one, early)
    assert len(list(folder.glob("*.jsonl"))) == 1  # its writer lives
    del kept


def test_mlflow_shows_the_answer_and_the_feedback_on_its_own_pages(cluster: Cluster, model: str, tmp_path: Path):
    import mlflow

    one = answer(model=model)
    written(tmp_path / "journal", one, feedback(one))
    traces.send(tmp_path / "journal", cluster)
    (trace,) = mlflow.MlflowClient(cluster.tracking_uri).search_traces(locations=[_id(cluster, model)])
    assert trace.info.request_preview == "Wie heißt Du? 🙂"
    assert trace.info.response_preview == "Ich heiße Bot."
    names = {"answer": one.id, "model": model, "version": "3", "run": one.run, "role": "champion", "user": "ann"}
    assert {f"dpo.{name}": value for name, value in names.items()}.items() <= trace.info.tags.items()
    (shown,) = trace.info.assessments
    assert (shown.name, shown.feedback.value, shown.source.source_type, shown.source.source_id) == (
        "thumb",
        "up",
        "HUMAN",
        "bob",
    )


def _id(cluster: Cluster, model: str) -> str:
    from mlflow import MlflowClient

    return MlflowClient(cluster.tracking_uri).get_experiment_by_name(traces.experiment_name(model)).experiment_id


def test_a_person_is_erased_from_mlflow_and_from_the_journals(cluster: Cluster, model: str, tmp_path: Path):
    folder, person = tmp_path / "journal", f"ann-{model}"
    theirs, others = answer(model=model, user=person, text="secret words"), answer(model=model, user="zoe")
    kept = [others, feedback(others)]
    gone = [theirs, feedback(theirs), feedback(others, rater=person), vote(others, theirs, person, "first")]
    journal = written(folder, *kept, *gone)
    traces.send(folder, cluster)
    journal.append(unsent := answer(model=model, user=person))
    journal.append(feedback(unsent))
    assert traces.erase(cluster, person, folder) == 6
    assert found(cluster, model) == by_id(*kept)
    traces.send(folder, cluster)
    (folder / traces.SENT).unlink()
    traces.send(folder, cluster)  # everything that the journal still has
    assert found(cluster, model) == by_id(*kept)
    assert not any(person.encode() in path.read_bytes() for path in folder.iterdir())
    assert traces.erase(cluster, person, folder) == 0
    assert traces.erase(cluster, "nobody", folder) == 0


def test_a_model_without_feedback_is_one_sentence(cluster: Cluster, tmp_path: Path):
    with pytest.raises(UserError, match="MLflow has no experiment feedback-nosuch"):
        list(traces.read(cluster, "feedback-nosuch"))


def test_reading_makes_no_store(tmp_path: Path):
    with pytest.raises(UserError, match=r"No feedback was collected yet\. Serve the model"):
        list(traces.read(at(f"sqlite:///{tmp_path}/mlflow.db"), "feedback-nosuch"))
    assert list(traces.read(at(f"sqlite:///{tmp_path}/mlflow.db"), "feedback-nosuch", missing_ok=True)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_server_that_is_down_loses_nothing_and_raises_nothing(
    mlflow_server: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from tests.support.proxy import proxied

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(traces, "LONGEST_PAUSE", 0.5)
    folder, stop = tmp_path / "journal", threading.Event()
    journal = written(folder, one := answer(model=model))
    with proxied(mlflow_server) as proxy:
        proxy.mode = "error"
        follower = threading.Thread(target=traces.follow, args=(folder, at(proxy.address), stop))
        follower.start()
        wait_for(lambda: "not sent yet, kept on disk" in capsys.readouterr().err, 60)
        journal.append(two := feedback(one))
        proxy.mode = "lost"  # MLflow takes requests, and its responses do not arrive
        before = proxy.requests
        wait_for(lambda: proxy.requests > before + 3, 60)
        journal.append(three := feedback(one, rater="ida"))
        proxy.mode = "good"
        wait_for(lambda: not traces._unsent(folder), 60)
        stop.set()
        follower.join(30)
    assert not follower.is_alive()
    assert found(at(mlflow_server), model) == by_id(one, two, three)


@pytest.mark.slow
def test_on_a_server_with_logins_the_forwarder_sends_and_the_writer_erases(
    mlflow_store: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {**VARIABLES, "MLFLOW_TRACKING_USERNAME": "", "MLFLOW_TRACKING_PASSWORD": ""}.items():
        monkeypatch.setenv(name, value)  # restored afterwards
    folder, one = tmp_path / "journal", answer(model=model)
    journal = written(folder, one, first := feedback(one))
    with mlflow_with_logins(tmp_path, mlflow_store) as address:
        assert traces.send(folder, at(address)) == 2
        assert os.environ["MLFLOW_TRACKING_USERNAME"] == "forwarder"
        journal.append(late := feedback(one, rater="ida"))
        assert traces.send(folder, at(address)) == 1
        assert found(at(address), model) == by_id(one, first, late)
        assert traces.erase(at(address), "ann", folder) == 3
        assert found(at(address), model) == []
