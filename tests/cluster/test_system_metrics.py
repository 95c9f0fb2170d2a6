"""CPU, memory and GPUs of training nodes: read on the node, logged by the driver at the step that was reached."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from tasks.cluster import system_metrics
from tasks.system.progress import Bar
from tasks.tracking.journal import StageJournal, read_lines
from tasks.tracking.tensorboard import Events
from tasks.train.driver import forward_metrics
from tests.support.workspaces import wait_for

CPU, MEMORY = "system/node0/cpu_utilization_percentage", "system/node0/system_memory_usage_percentage"


def test_a_node_leaves_its_figures_and_the_driver_reads_each_once(tmp_path: Path) -> None:
    (tmp_path / "usage-1.jsonl").write_text(
        '{"system/node1/cpu_utilization_percentage": 1.0}\n'
    )  # an earlier attempt's
    readings = system_metrics.Reader(tmp_path)
    sampling = threading.Thread(target=system_metrics.sample, args=(tmp_path, 0, 0.01), daemon=True)
    sampling.start()
    found: dict[str, float] = {}
    wait_for(lambda: found.update(readings.read_new()) or found, 60)
    shutil.rmtree(tmp_path)  # which ends the thread: it would fork a hundred times a second beside all other tests
    sampling.join(60)
    assert not sampling.is_alive()
    assert {CPU, MEMORY} <= set(found)
    assert all(name.startswith("system/node0/") and 0 <= value <= 100 for name, value in found.items())


def test_gpu_usage_is_what_the_driver_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '0, 37, 1000, 4000'\necho '1, [N/A], 1, 3'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    usage = system_metrics.node_usage()
    assert {name: value for name, value in usage.items() if name.startswith("gpu_")} == {
        "gpu_0_utilization_percentage": 37.0,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_1_memory_usage_percentage": 33.3,
    }


def test_figures_stand_at_the_last_logged_step(tmp_path: Path) -> None:
    def work(over: threading.Event) -> None:
        (tmp_path / "metrics.jsonl").write_text(
            json.dumps({"kind": "metrics", "step": 7, "values": {"lr": 1.0}}) + "\n"
        )
        (tmp_path / "usage-0.jsonl").write_text(json.dumps({CPU: 50.0}) + "\n")
        over.set()

    over = threading.Event()
    run = StageJournal(tmp_path, "train")
    with Bar("train", 9, "steps") as bar:
        beside = threading.Timer(0.1, work, [over])
        beside.start()
        forward_metrics(tmp_path / "metrics.jsonl", run, bar, Events(None), over)
        beside.join()
    lines, _ = read_lines(run.journal)
    assert [(line["step"], line["values"]) for line in lines] == [(7, {"lr": 1.0}), (7, {CPU: 50.0})]


@pytest.mark.slow
def test_a_real_training_has_them_in_its_journal_and_not_in_its_curves(trained: Path) -> None:
    (journal,) = trained.glob(".scratch/runs/*/train.jsonl")
    logged = [line for line in read_lines(journal)[0] if line["kind"] == "metrics" and CPU in line["values"]]
    assert logged
    assert all(0 < line["values"][MEMORY] <= 100 for line in logged)
    assert "system/" not in (trained / "data" / "metrics" / "train.csv").read_text()
