"""10,000 events of feedback while the sender is killed and MLflow is restarted: none is lost, none is doubled."""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.background import free_port, is_healthy
from tasks.config.cluster import load_cluster
from tasks.feedback import traces
from tasks.feedback.events import Event
from tasks.feedback.journal import FeedbackJournal
from tasks.system import processes
from tests.support.feedback import answer, feedback, vote
from tests.support.workspaces import PROJECT, wait_for

pytestmark = pytest.mark.slow
PAIRS, THREADS = 500, 4  # two answers, 12 thumbs and edits, 6 votes each


def events(number: int) -> list[Event]:
    """Of one thread: answers, each with thumbs, an edit and votes of several raters."""
    made = list[Event]()
    for _ in range(PAIRS // THREADS):
        two = answer(model="faults", user=f"user {number}"), answer(model="faults", role="challenger")
        made += two
        for one in two:
            made += [feedback(one, rater=f"rater {rater}") for rater in range(4)]
            made += [feedback(one, kind="edit", value="Besser.", rater=f"rater {rater}") for rater in range(2)]
        made += [vote(*two, f"rater {rater}", "first") for rater in range(6)]
    return made


@contextmanager
def server(store: Path, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{store}/mlflow.db", "--artifacts-destination", str(store / "files")]
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    with (store / "server.log").open("a") as log, processes.spawn([*command, *stores], store, env, log):
        wait_for(lambda: is_healthy(f"http://127.0.0.1:{port}/health"), 300)
        yield


@contextmanager
def sender(folder: Path, address: str) -> Iterator[None]:
    """A process that sends until it is killed with SIGKILL."""
    env = {**os.environ, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    command = [sys.executable, "-m", "tests.support.feedback_sender", str(folder), address]
    process = subprocess.Popen(command, cwd=PROJECT, env=env, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_ten_thousand_events_under_kills_and_a_restart(mlflow_store: Path, tmp_path: Path):
    store, folder, chance = tmp_path / "store", tmp_path / "journal", random.Random(18)
    shutil.copytree(mlflow_store, store)
    address = f"http://127.0.0.1:{(port := free_port())}"
    every = [events(number) for number in range(THREADS)]
    journals = [FeedbackJournal(folder) for _ in range(2)]

    def write(number: int) -> None:
        for event in every[number]:
            journals[number % 2].append(event)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
    with server(store, port):
        for writer in writers:
            writer.start()
        for _ in range(3):
            before = sent(folder)
            with sender(folder, address):
                wait_for(lambda: sent(folder) > before, 300)  # noqa: B023 - called in this turn of the loop
                time.sleep(chance.uniform(0.0, 2.0))
    with sender(folder, address):  # MLflow is down
        time.sleep(2.0)
    with server(store, port), sender(folder, address):
        before = sent(folder)
        wait_for(lambda: sent(folder) > before, 300)
    for writer in writers:
        writer.join()
    cluster = load_cluster().model_copy(update={"tracking_uri": f"sqlite:///{store}/mlflow.db"})
    traces.send(folder, cluster)

    found = list(traces.read(cluster, "feedback-faults"))
    written = [event for some in every for event in some]
    assert len(written) == 10_000
    assert sorted(event.id for event in found) == sorted(event.id for event in written)


def sent(folder: Path) -> int:
    return sum(traces._offsets(folder).values())
