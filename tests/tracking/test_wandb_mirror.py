"""The copy of a run in Weights & Biases, with its real package in offline mode, read back from the files it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tasks.errors import UserError
from tasks.system.files import read_json, write_json
from tasks.system.lock import file_lock
from tasks.tracking import wandb_mirror
from tasks.tracking.journal import StageJournal
from tasks.tracking.wandb_mirror import mirrored, send_all, unsent
from tests.support.workspaces import wait_for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "brave-otter"
    folder.mkdir()
    write_json(folder / "settings.json", {"wandb_project": "alignment"})
    write_json(folder / "params.json", {"train": {"beta": 0.1}})
    return folder


def stored(folder: Path) -> tuple[list[dict[str, float]], dict[str, float], dict[str, object], set[str]]:
    """Points, final values, configuration and run ids of all offline files of a run."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    points, final, config, ids = [], {}, {}, set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                assert (record.run.project, record.run.display_name) == ("alignment", "brave-otter")
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("config"):
                config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            if record.HasField("history"):
                point = {item.nested_key[0] or item.key: json.loads(item.value_json) for item in record.history.item}
                points.append({name: value for name, value in point.items() if not name.startswith("_")})
            if record.HasField("summary"):
                final |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update}
    return points, final, config, ids


@pytest.mark.slow
def test_params_curves_and_final_values_arrive_once_over_several_processes(folder: Path):
    run = StageJournal(folder, "train")
    run.metrics(1, {"loss": 0.7})
    run.metrics(2, {"loss": 0.5, "eval/loss": 0.6})
    assert send_all(folder.parent) == []
    assert not unsent(folder)
    run.metrics(3, {"loss": 0.4})
    run.summary({"eval/rewards/accuracies": 0.9})
    run.tags({"git_commit": "abc"})
    run.progress(3, 3, "steps")
    with mirrored(folder):
        run.metrics(4, {"loss": 0.3})
    wait_for(lambda: not unsent(folder), 60)
    with file_lock(folder / "wandb.lock"):  # the process that sent has ended
        pass
    points, final, config, ids = stored(folder)
    assert points == [
        {"loss": 0.7, "step": 1},
        {"loss": 0.5, "eval/loss": 0.6, "step": 2},
        {"loss": 0.4, "step": 3},
        {"loss": 0.3, "step": 4},
    ]
    assert final["eval/rewards/accuracies"] == 0.9
    assert config["train.beta"] == 0.1
    assert config["tags.git_commit"] == "abc"
    assert ids == {read_json(folder / "wandb.json")["id"]}


@pytest.mark.slow
@pytest.mark.exhaustive  # test_outage.py has the same of MLflow
def test_a_server_that_is_down_keeps_the_lines_for_the_next_try(folder: Path):
    StageJournal(folder, "train").metrics(1, {"loss": 0.7})
    code = "from tasks.tracking import wandb_mirror; wandb_mirror.LAST_SECONDS = 3.0; wandb_mirror.main()"
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
    tried = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, **nowhere},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert tried.returncode == 1
    assert "Weights & Biases did not answer in 3 s; `dpo sync` tries again" in tried.stderr
    assert unsent(folder)
    assert send_all(folder.parent) == []
    assert stored(folder)[0] == [{"loss": 0.7, "step": 1}]


def test_without_a_project_no_process_starts(folder: Path):
    write_json(folder / "settings.json", {"wandb_project": None})
    StageJournal(folder, "train").metrics(1, {"loss": 0.7})
    before = set(psutil.Process().children())
    with mirrored(folder):
        assert set(psutil.Process().children()) == before
    assert send_all(folder.parent) == []
    assert not (folder / "wandb.json").exists()


def test_a_missing_package_is_reported_before_anything_runs(monkeypatch):
    monkeypatch.setattr(wandb_mirror, "find_spec", lambda name: None)
    wandb_mirror.check_installed(None)
    with pytest.raises(UserError, match="wandb_project is alignment, and the package wandb is not installed"):
        wandb_mirror.check_installed("alignment")
