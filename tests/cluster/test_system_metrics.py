"""CPU, memory and GPUs of training nodes: read and written on the node, at the step that was reached."""

import shutil
import threading
from pathlib import Path

import pytest

from tasks.cluster import system_metrics
from tasks.tracking.journal import Journal, StageJournal
from tasks.tracking.journal_reader import read_journal
from tests.support.workspaces import wait_for

CPU, MEMORY = "system/node0/cpu_utilization_percentage", "system/node0/system_memory_usage_percentage"


def test_a_node_writes_its_figures_at_the_step_that_was_reached(tmp_path: Path) -> None:
    """Each step's first figures count, however often the node looks."""
    training = tmp_path / "training"
    training.mkdir()
    journal, run = Journal(training / "metrics.jsonl"), StageJournal(tmp_path, "train")
    sampling = threading.Thread(target=system_metrics.sample, args=(journal.path, 0, 0.01), daemon=True)

    def figures() -> dict[int, dict[str, float]]:
        return {line["step"]: line["values"] for line in read_journal(run.path)[0] if CPU in line["values"]}

    with run.including(training):
        sampling.start()
        wait_for(lambda: 0 in figures(), 60)
        journal.metrics(7, {"loss": 0.5})
        wait_for(lambda: 7 in figures(), 60)
        wait_for(lambda: len((training / "usage-0.jsonl").read_text().splitlines()) > 3, 60)
        shutil.rmtree(training)  # which ends the thread: it would fork a hundred times a second beside all other tests
        sampling.join(60)
        assert not sampling.is_alive()


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


@pytest.mark.slow
def test_a_real_training_has_them_in_its_journal_and_not_in_its_curves(trained: Path) -> None:
    (journal,) = trained.glob(".scratch/runs/*/train.jsonl")
    logged = [line for line in read_journal(journal)[0] if line["kind"] == "metrics" and CPU in line["values"]]
    steps = [line["step"] for line in logged]
    assert steps == sorted(set(steps))
    assert logged
    assert all(0 < line["values"][MEMORY] <= 100 for line in logged)
    assert "system/" not in (trained / "data" / "metrics" / "train.csv").read_text()
