"""The other half of tracking.py: journals to MLflow. Runs in a process of its own; the one importer of mlflow."""

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.files import read_json, write_json
from tasks.tracking import flatten, read_lines

LONGEST_PARAM = 500


def follow(folder: Path, stage: str, writer: int) -> None:
    """Send the stage's journal as it grows, until it ends or its writer is gone."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    with store(folder) as client:
        while not send(client, folder, stage):
            if (
                not Path(f"/proc/{writer}").exists()
                and not read_lines(folder / f"{stage}.jsonl", _sent(folder, stage))[0]
            ):
                _end(client, folder, stage, "KILLED")
                return
            time.sleep(0.5)


def send_all(runs: Path) -> int:
    """Send what every journal still holds; how many there were."""
    waiting = [
        journal
        for journal in sorted(runs.glob("*/*.jsonl"))
        if _sent(journal.parent, journal.stem) < journal.stat().st_size
    ]
    for journal in waiting:
        with store(journal.parent) as client:
            send(client, journal.parent, journal.stem)
    return len(waiting)


@contextmanager
def store(folder: Path) -> Iterator[Any]:
    """A client of the run's tracking store. A fresh SQLite file is made once, by one process."""
    from mlflow import MlflowClient

    settings = read_json(folder / "settings.json")
    path = settings["tracking_uri"].removeprefix("sqlite:///")
    local = path != settings["tracking_uri"]
    with _locked(Path(path).parent / "store.lock" if local else folder / "store.lock"):
        client = MlflowClient(settings["tracking_uri"], registry_uri=settings["tracking_uri"])
        _parent(client, folder, settings["exp_name"], Path(path).parent / "artifacts" if local else None)
    yield client


def send(client: Any, folder: Path, stage: str) -> bool:
    """Send the lines that have not been sent; whether the journal has ended."""
    journal = folder / f"{stage}.jsonl"
    lines, offset = read_lines(journal, _sent(folder, stage))
    parent = read_json(folder / "run.json")
    ended = False
    for line in lines:
        _apply(client, folder, stage, parent, line)
        ended = line["kind"] == "end" or (ended and line["kind"] != "start")
    if lines:
        write_json(folder / f"{stage}.sent.json", {"offset": offset})
    return ended


def _apply(client: Any, folder: Path, stage: str, parent: dict[str, str], line: dict[str, Any]) -> None:
    run_id = _child(client, folder, stage, parent)
    match line["kind"]:
        case "start":
            client.update_run(run_id, status="RUNNING")
            client.update_run(parent["run_id"], status="RUNNING")
        case "params":
            _log_params(client, run_id, line["values"])
        case "metrics":
            _log_metrics(client, run_id, line["values"], line["step"], line["time"])
        case "summary":
            for target in (run_id, parent["run_id"]):
                _log_metrics(client, target, line["values"], 0, line["time"])
        case "tags":
            for name, value in line["values"].items():
                client.set_tag(parent["run_id"], name, value)
        case "dataset":
            for target in (run_id, parent["run_id"]):
                _log_dataset(client, target, line)
        case "artifact":
            if Path(line["path"]).exists():
                client.log_artifact(run_id, line["path"])
        case "end":
            _end(client, folder, stage, line["status"])


def _log_params(client: Any, run_id: str, values: dict[str, Any]) -> None:
    from mlflow.entities import Param

    texts = {name: str(value) for name, value in values.items()}
    short = {n: t if len(t) <= LONGEST_PARAM else t[:LONGEST_PARAM] + " ...(cut)" for n, t in texts.items()}
    known = client.get_run(run_id).data.params  # a repeated stage may not change a logged param
    client.log_batch(run_id, params=[Param(name, text) for name, text in short.items() if name not in known])


def _log_metrics(client: Any, run_id: str, values: dict[str, float], step: int, when: int) -> None:
    from mlflow.entities import Metric

    client.log_batch(run_id, metrics=[Metric(name, float(value), when, step) for name, value in values.items()])


def _log_dataset(client: Any, run_id: str, line: dict[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    data = Dataset(line["name"], line["digest"][:32], "local", line["source"])
    client.log_inputs(run_id, [DatasetInput(data, [InputTag("mlflow.data.context", line["name"])])])


def _parent(client: Any, folder: Path, experiment: str, artifacts: Path | None) -> None:
    """The pipeline run's own run, made once and named in run.json."""
    if (folder / "run.json").exists():
        return
    found = client.get_experiment_by_name(experiment)
    location = artifacts.resolve().as_uri() if artifacts else None
    number = found.experiment_id if found else client.create_experiment(experiment, artifact_location=location)
    tags = {"mlflow.source.name": "dpo", "mlflow.source.git.commit": _commit(), "pipeline_run": folder.name}
    run = client.create_run(number, run_name=folder.name, tags=tags)
    _log_params(client, run.info.run_id, flatten(read_json(folder / "params.json")))
    client.log_artifact(run.info.run_id, str(folder / "params.json"))
    uri = read_json(folder / "settings.json")["tracking_uri"]
    write_json(folder / "run.json", {"experiment_id": number, "run_id": run.info.run_id, "tracking_uri": uri})


def _child(client: Any, folder: Path, stage: str, parent: dict[str, str]) -> str:
    file = folder / f"{stage}.run.json"
    if not file.exists():
        tags = {"mlflow.parentRunId": parent["run_id"], "stage": stage}
        run = client.create_run(parent["experiment_id"], run_name=stage, tags=tags)
        write_json(file, {"run_id": run.info.run_id})
    return read_json(file)["run_id"]


def _end(client: Any, folder: Path, stage: str, status: str) -> None:
    parent = read_json(folder / "run.json")
    client.set_tag(parent["run_id"], f"stage.{stage}", "ran" if status == "FINISHED" else status.lower())
    for run_id in (_child(client, folder, stage, parent), parent["run_id"]):
        client.set_terminated(run_id, status)


def _sent(folder: Path, stage: str) -> int:
    file = folder / f"{stage}.sent.json"
    return read_json(file)["offset"] if file.exists() else 0


def _commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return answer.stdout.strip() or "unknown"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
