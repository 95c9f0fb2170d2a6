"""The other half of tracking.py: journals to MLflow, in a process of its own.

`python -m tasks.forward` sends whatever any run still has to send.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.files import home, read_json, write_json
from tasks.params import load_cluster
from tasks.tracking import FLOW, flatten, read_lines, sent

LONGEST_PARAM = 500
IDLE_SECONDS = 10  # more than DVC takes between two stages


def follow(folder: Path) -> None:
    """Send the run's journals as they grow, until the run is closed or nobody writes any more."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    waiting = True
    while waiting:
        with _locked(folder / "forward.lock", wait=False) as mine:
            if not mine:
                return
            try:
                _follow(folder)
            except Exception:
                traceback.print_exc()
                (folder / "forward.error").write_text("see forward.log")
                sys.exit(1)
        # A stage that started while we decided to end found the lock taken.
        waiting = any(sent(folder, path.stem) < path.stat().st_size for path in folder.glob("*.jsonl"))


def _follow(folder: Path) -> None:
    with store(folder) as client:
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < IDLE_SECONDS:
            new = [line for stage in _journals(folder) for line in send(client, folder, stage)]
            if any(line["kind"] == "close" for line in new):
                return
            if new or _at_work(folder):
                quiet_since = time.monotonic()
            time.sleep(0.3)


def _at_work(folder: Path) -> bool:
    """Whether a stage still writes; the journal of one that was killed is ended here."""
    working = False
    for stage in _journals(folder):
        ends = [line for line in read_lines(folder / f"{stage}.jsonl")[0] if line["kind"] in ("start", "end")]
        if ends and ends[-1]["kind"] == "start":
            alive = Path(f"/proc/{ends[-1]['pid']}").exists()
            working = working or alive
            if not alive:
                line = {"kind": "end", "time": int(time.time() * 1000), "status": "KILLED"}
                with (folder / f"{stage}.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return working


def _journals(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.jsonl"))


def send_all(runs: Path) -> int:
    """Send what every journal still holds; how many there were."""
    waiting = [path for path in sorted(runs.glob("*/*.jsonl")) if sent(path.parent, path.stem) < path.stat().st_size]
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


def send(client: Any, folder: Path, stage: str) -> list[dict[str, Any]]:
    """Send the lines of a journal that have not been sent; these lines."""
    lines, offset = read_lines(folder / f"{stage}.jsonl", sent(folder, stage))
    for line in lines:
        _apply(client, folder, stage, line)
    if lines:
        write_json(folder / f"{stage}.sent.json", {"offset": offset})
    return lines


def _apply(client: Any, folder: Path, stage: str, line: dict[str, Any]) -> None:
    parent = read_json(folder / "run.json")["run_id"]
    runs = [parent] if stage == FLOW else [_child(client, folder, stage), parent]
    match line["kind"]:
        case "start":
            for run_id in runs:
                client.update_run(run_id, status="RUNNING")
        case "params":
            _log_params(client, runs[0], line["values"])
        case "metrics":
            _log_metrics(client, runs[0], line["values"], line["step"], line["time"])
        case "summary":
            for run_id in runs:
                _log_metrics(client, run_id, line["values"], 0, line["time"])
        case "tags":
            for name, value in line["values"].items():
                client.set_tag(parent, name, value)
        case "dataset":
            for run_id in runs:
                _log_dataset(client, run_id, line)
        case "artifact":
            if Path(line["path"]).exists():
                client.log_artifact(runs[0], line["path"])
        case "end":
            if stage != FLOW:
                done = line["status"] == "FINISHED"
                client.set_tag(parent, f"stage.{stage}", "ran" if done else line["status"].lower())
            for run_id in runs:
                client.set_terminated(run_id, line["status"])


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


def _child(client: Any, folder: Path, stage: str) -> str:
    file = folder / f"{stage}.run.json"
    if not file.exists():
        parent = read_json(folder / "run.json")
        tags = {"mlflow.parentRunId": parent["run_id"], "stage": stage}
        run = client.create_run(parent["experiment_id"], run_name=stage, tags=tags)
        write_json(file, {"run_id": run.info.run_id})
    return read_json(file)["run_id"]


def _commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return answer.stdout.strip() or "unknown"


@contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Yields whether the lock is ours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def main() -> None:
    if len(sys.argv) > 1:
        follow(Path(sys.argv[1]))
    else:
        print(f"sent {send_all(home() / load_cluster().logging_dir)} journals")


if __name__ == "__main__":
    main()
