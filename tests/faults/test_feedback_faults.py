"""Thousands of events while the sender is killed and MLflow is restarted: none is lost, none is doubled."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from services.health import is_healthy
from tasks.config.cluster import load_cluster
from tasks.feedback import traces
from tasks.feedback.events import Event
from tasks.feedback.journal import FeedbackJournal
from tasks.system import processes
from tasks.system.ports import free_port
from tests.support.feedback import answer, feedback, vote
from tests.support.workspaces import PROJECT, wait_for

pytestmark = pytest.mark.slow
THREADS = 4


def events(number: int, pairs: int) -> list[Event]:
    """Of one thread: pairs of answers, 20 events each, with thumbs, edits and votes of several raters."""
    made = list[Event]()
    for _ in range(pairs // THREADS):
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
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1", "FORK_STAGES": "1"}
    with (store / "server.log").open("a") as log, processes.spawn([*command, *stores], store, env, log):
        wait_for(lambda: is_healthy(f"http://127.0.0.1:{port}/health"), 300)
        yield


@contextmanager
def sender(folder: Path, address: str) -> Iterator[Path]:
    """A process that sends until it is killed with SIGKILL; what it says."""
    env = {**os.environ, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    command = [sys.executable, "-m", "tests.support.feedback_sender", str(folder), address]
    with (said := folder.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen(command, cwd=PROJECT, env=env, stderr=log)
    try:
        yield said
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("pairs", [100, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_thousands_of_events_under_kills_and_a_restart(mlflow_store: Path, tmp_path: Path, pairs: int):
    store, folder, chance = tmp_path / "store", tmp_path / "journal", random.Random(18)
    shutil.copytree(mlflow_store, store)
    address = f"http://127.0.0.1:{(port := free_port())}"
    every = [events(number, pairs) for number in range(THREADS)]
    journals = [FeedbackJournal(folder) for _ in range(2)]

    def write(number: int) -> None:
        for event in every[number]:
            journals[number % 2].append(event)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
    with server(store, port):
        for writer in writers:
            writer.start()
        for _ in range(3):
            # At any point of a batch, of which MLflow then has more than the sender has noted; half of all are left.
            enough = arrived(store) + chance.randint(pairs // 8, pairs // 3)
            with sender(folder, address):
                wait_for(lambda: arrived(store) >= enough, 300, pause=0.01)  # noqa: B023 - called in this turn
    assert 0 < arrived(store) < 2 * pairs
    with sender(folder, address) as said:  # MLflow is down
        wait_for(lambda: "not sent yet, kept on disk" in said.read_text(), 60)
    with server(store, port), sender(folder, address):
        before = sent(folder)
        wait_for(lambda: sent(folder) > before, 300)
    for writer in writers:
        writer.join()
    cluster = load_cluster().model_copy(update={"tracking_uri": f"sqlite:///{store}/mlflow.db"})
    traces.send(folder, cluster)

    found = list(traces.read(cluster, "feedback-faults"))
    written = [event for some in every for event in some]
    assert len(written) == 20 * pairs
    assert sorted(event.id for event in found) == sorted(event.id for event in written)


def arrived(store: Path) -> int:
    """How many answers MLflow has."""
    with closing(sqlite3.connect(store / "mlflow.db")) as database:
        return int(database.execute("SELECT count(*) FROM trace_info").fetchone()[0])


def sent(folder: Path) -> int:
    return sum(traces._offsets(folder).values())
