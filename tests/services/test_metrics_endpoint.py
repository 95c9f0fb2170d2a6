"""The metrics endpoint, scraped over HTTP and parsed by Prometheus' own library; test_services.py scrapes all of it."""

import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from services.health import is_healthy
from tasks.runs.records import CRASHED, RunRecord
from tasks.system import processes
from tasks.system.files import write_json
from tasks.system.ports import free_port
from tasks.system.processes import this_process
from tasks.system.progress import Bar, notify
from tasks.tracking.journal import Journal, StageJournal
from tests.support.prometheus import scrape, scraped
from tests.support.workspaces import PROJECT, wait_for

PASSWORD = "a-password-of-ours"
UNREACHABLE = "http://127.0.0.1:9"  # no server listens there


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPO_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", f"{UNREACHABLE}/api")
    monkeypatch.delenv("DPO_CLUSTER", raising=False)
    shutil.copy(PROJECT / "params.yaml", tmp_path)
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "cluster.yaml").write_text("{}\n")
    return tmp_path


@pytest.fixture
def endpoint(home: Path) -> Iterator[str]:
    address = f"http://127.0.0.1:{(port := free_port())}"
    env = {**os.environ, "DPO_METRICS_PASSWORD": PASSWORD, "SOME_PASSWORD": "hunter2-hunter2"}
    command = [sys.executable, "-m", "services.metrics_endpoint", "--port", str(port)]
    with (home / "log").open("w") as log, processes.spawn(command, PROJECT, env, log):
        wait_for(lambda: is_healthy(f"{address}/health"), 60)
        yield f"{address}/metrics"


def run_folder(home: Path, name: str) -> Path:
    folder = home / ".scratch" / "runs" / name
    folder.mkdir(parents=True)
    write_json(folder / "settings.json", {"tracking_uri": "http://user:hidden-password@mlflow:5000"})
    return folder


def test_a_scrape_in_mid_run_shows_step_total_and_speed(home: Path, endpoint: str) -> None:
    run = StageJournal(run_folder(home, "by-hand"), "train")
    training = Journal(home / ".scratch" / "train" / "hash" / "metrics.jsonl")  # which rank 0 writes
    training.path.parent.mkdir(parents=True)
    run.write("start", **this_process())
    with run.including(training.path.parent), notify(run.progress), Bar("train", 40, "steps") as bar:
        training.metrics(7, {"loss": 0.5, "rewards/accuracies": 0.75, "pairs_per_second": 12.0})
        bar.update(7)
        training.metrics(8, {"loss": 0.25, "pairs_per_second": 13.0})
        samples = scraped(scrape(endpoint, f"reader:{PASSWORD}"))
        assert samples["dpo_stage_done"] == {("by-hand", "train", "steps"): 8}
        assert samples["dpo_stage_total"] == {("by-hand", "train", "steps"): 40}
        assert samples["dpo_train_loss"] == {("by-hand",): 0.25}
        assert samples["dpo_train_reward_accuracy"] == {("by-hand",): 0.75}
        assert samples["dpo_train_pairs_per_second"] == {("by-hand",): 13.0}
        assert samples["dpo_unsent_journal_lines"][()] == 4  # start, the bar's total, two steps
        assert 0 < samples["dpo_output_dir_free_bytes"][()] < samples["dpo_output_dir_size_bytes"][()]
        training.metrics(9, {"loss": 0.125})
        assert scraped(scrape(endpoint, f"reader:{PASSWORD}"))["dpo_train_loss"] == {("by-hand",): 0.125}
    run.write("end", status="FINISHED")
    assert not scraped(scrape(endpoint, f"reader:{PASSWORD}"))["dpo_stage_done"]


def test_the_stage_of_a_killed_run_is_not_active(home: Path, endpoint: str) -> None:
    """Its record says running, but no process holds its lock."""
    folder = run_folder(home, "killed")
    StageJournal(folder, "train").write("start", **this_process())
    record = RunRecord("killed", str(home), since="2026-11-16T00:00:00+00:00", pid=1, worktree_ready=True)
    assert record.current_state == CRASHED
    write_json(folder / "record.json", asdict(record))
    assert not scraped(scrape(endpoint, f"reader:{PASSWORD}"))["dpo_stage_started_timestamp_seconds"]


def test_a_source_that_is_down_is_zero_and_reported_once(home: Path, endpoint: str) -> None:
    (home / "infra" / "cluster.yaml").write_text(f"tracking_uri: {UNREACHABLE}\n")
    states = [scraped(scrape(endpoint, f"reader:{PASSWORD}"))["dpo_source_up"] for _ in range(2)]
    assert states == 2 * [{("configuration",): 1, ("prefect",): 0, ("mlflow",): 0, ("runs",): 1}]
    (home / "infra/cluster.yaml").write_text("nonsense: true\n")
    assert scraped(scrape(endpoint, f"reader:{PASSWORD}"))["dpo_source_up"] == {("configuration",): 0}
    output = (home / "log").read_text()
    assert "Traceback" not in output
    assert [
        output.count(f"metrics: {name} could not be read: ") for name in ("prefect", "mlflow", "configuration")
    ] == [
        1,
        1,
        1,
    ]


def test_a_scrape_needs_the_login_and_shows_no_password(home: Path, endpoint: str) -> None:
    StageJournal(run_folder(home, "hunter2-hunter2"), "source").write("start", **this_process())
    text = scrape(endpoint, f"reader:{PASSWORD}")
    assert 'run="***"' in text
    assert not [word for word in ("hunter2", "hidden-password", PASSWORD) if word in text]
    for login in ("reader:guess", f"admin:{PASSWORD}", ""):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape(endpoint, login)
    with urllib.request.urlopen(endpoint.replace("/metrics", "/health")) as answer:
        assert answer.read() == b"ok\n"


def test_the_dashboard_has_the_fields_that_grafana_imports() -> None:
    board = json.loads((PROJECT / "infra/grafana/dpo.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 10
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["expr"] for target in panel["targets"])
    (choice,) = board["templating"]["list"]
    assert (choice["name"], choice["type"]) == ("datasource", "datasource")
    scrapes = yaml.safe_load((PROJECT / "infra/prometheus/prometheus.yaml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in scrapes] == ["dpo", "prefect", "ray"]
