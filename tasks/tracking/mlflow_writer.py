"""Writes the lines of a journal to MLflow.

Any line may come twice: a forwarder that dies between sending it and noting that leaves it to the next one. So a run is
found again by its mark, a metric carries the time of its line (the same name, step, time and value is one point to
MLflow), and a final value that is there already is not logged again.
"""

import json
import math
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from tasks.redact import redact
from tasks.system.files import fingerprint, read_json, recall, write_json, write_text
from tasks.system.lock import file_lock
from tasks.tracking.experiment import experiment
from tasks.tracking.journal import FLOW, flatten, read_lines
from tasks.tracking.mlflow_client import CONFIGURATION, without_retries

Line = dict[str, Any]
LONGEST_PARAM = 500
MOST_PARAMS, MOST_METRICS = 100, 1000  # that MLflow takes in one call
DIGITS = 5  # significant digits of a parent run's metrics: MLflow's list of runs shows every digit that it has
NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")
MARK = "mlflow.journal"  # the tag by which a run is found again; MLflow hides what begins so
REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST"}  # for good: no second try helps


@contextmanager
def store(folder: Path) -> Iterator[Any]:
    """A client of the run's tracking store. A fresh SQLite file is made once, by one process."""
    from mlflow import MlflowClient

    settings = read_json(folder / "settings.json")
    path = settings["tracking_uri"].removeprefix("sqlite:///")
    local = path != settings["tracking_uri"]
    with file_lock(Path(path).parent / "store.lock" if local else folder / "store.lock"):
        client = MlflowClient(settings["tracking_uri"], registry_uri=settings["tracking_uri"])
        _parent(client, folder, settings, Path(path).parent / "artifacts" if local else None)
    yield client


def record(client: Any, folder: Path, stage: str, lines: Sequence[Line]) -> None:
    """Metrics that follow each other travel in one call: a slow server is asked seldom."""
    for stepped, group in groupby(lines, key=lambda line: line["kind"] == "metrics"):
        if stepped:
            _log_curves(client, folder, stage, list(group))
        else:
            for line in group:
                _tolerant(_apply, client, folder, stage, line)


def _log_curves(client: Any, folder: Path, stage: str, lines: Sequence[Line]) -> None:
    """On the stage's run in full precision, and on the parent, because MLflow's list and charts show parents."""
    if stage != FLOW:
        _log_metrics(client, _child(client, folder, stage), lines)
    short = [{**line, "values": _rounded(line["values"])} for line in lines]
    _log_metrics(client, read_json(folder / "run.json")["run_id"], short)


def _tolerant(function: Any, *arguments: Any) -> None:
    """Log and skip what MLflow refuses permanently (a deleted run, for example) instead of retrying for ever."""
    from mlflow.exceptions import MlflowException, RestException

    try:
        function(*arguments)
    except MlflowException as error:
        from_afar = not isinstance(error, RestException) and "API request" in str(error)
        if error.error_code not in REFUSED or from_afar:  # a proxy's 404 is no word of MLflow's
            raise
        print(f"left out, because MLflow refuses it: {redact(str(error))}", file=sys.stderr, flush=True)


def _apply(client: Any, folder: Path, stage: str, line: Line) -> None:
    parent = read_json(folder / "run.json")["run_id"]
    runs = [parent] if stage == FLOW else [_child(client, folder, stage), parent]
    match line["kind"]:
        case "start":
            for run_id in runs:
                client.update_run(run_id, status="RUNNING")
        case "params":
            _log_params(client, runs[0], line["values"])
        case "summary":
            final = {**line, "values": _without_steps(folder, stage, line["values"])}
            _log_final(client, parent, {**final, "values": _rounded(final["values"])})
            if stage != FLOW:
                _log_final(client, runs[0], final)
        case "tags":
            _set_tags(client, parent, line["values"])
        case "dataset":
            for run_id in runs:
                _log_dataset(client, run_id, line)
        case "artifact":
            if Path(line["path"]).exists():
                client.log_artifact(runs[0], line["path"])
        case "end":
            _end(client, runs, stage, line)


def _end(client: Any, runs: list[str], stage: str, line: Line) -> None:
    if stage != FLOW:
        done = line["status"] == "FINISHED"
        client.set_tag(runs[-1], f"stage.{stage}", "ran" if done else line["status"].lower())
    for run_id in runs:
        client.set_terminated(run_id, line["status"], end_time=line["time"])  # when it was, not when it is sent


def _log_params(client: Any, run_id: str, values: dict[str, Any]) -> None:
    from mlflow.entities import Param

    texts = {name_of(name): redact(str(value)) for name, value in values.items()}
    short = {n: t if len(t) <= LONGEST_PARAM else t[:LONGEST_PARAM] + " ...(cut)" for n, t in texts.items()}
    known = client.get_run(run_id).data.params  # a repeated stage may not change a logged param
    new = [Param(name, text) for name, text in short.items() if name not in known]
    for start in range(0, len(new), MOST_PARAMS):
        client.log_batch(run_id, params=new[start : start + MOST_PARAMS])


def _log_metrics(client: Any, run_id: str, lines: Sequence[Line]) -> None:
    from mlflow.entities import Metric

    points = [
        Metric(name_of(name), float(value), line["time"], line.get("step", 0))
        for line in lines
        for name, value in line["values"].items()
    ]
    for start in range(0, len(points), MOST_METRICS):
        _tolerant(client.log_batch, run_id, points[start : start + MOST_METRICS])


def _log_final(client: Any, run_id: str, line: Line) -> None:
    """Of a run as a whole: one point each."""
    known = client.get_run(run_id).data.metrics
    new = {name: value for name, value in line["values"].items() if known.get(name_of(name)) != value}
    if new:
        _log_metrics(client, run_id, [{**line, "values": new, "step": line.get("at", 0)}])


def _rounded(values: dict[str, float]) -> dict[str, float]:
    """Counts stay exact."""
    plain = {name: float(value) for name, value in values.items()}
    return {
        name: value if not math.isfinite(value) or value.is_integer() else float(f"{value:.{DIGITS}g}")
        for name, value in plain.items()
    }


def _without_steps(folder: Path, stage: str, values: dict[str, float]) -> dict[str, float]:
    """Final values that the stage did not log by step: those would get a stray point."""
    if stage == FLOW:  # its curves are those of a training that was cached, its final values those of evaluate
        return values
    lines, _ = read_lines(folder / f"{stage}.jsonl")
    stepped = {name for line in lines if line["kind"] == "metrics" for name in line["values"]}
    return {name: value for name, value in values.items() if name not in stepped}


def _set_tags(client: Any, run_id: str, values: dict[str, Any]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(name_of(name), redact(str(value))) for name, value in values.items()])


def _log_dataset(client: Any, run_id: str, line: Line) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source, rows = json.dumps({"uri": redact(line["source"])}), line.get("rows")
    profile = json.dumps({"num_rows": rows}) if rows is not None else None
    data = Dataset(line["name"], line["digest"][:32], "local", source, profile=profile)
    client.log_inputs(run_id, [DatasetInput(data, [InputTag("mlflow.data.context", line["name"])])])


def _parent(client: Any, folder: Path, settings: dict[str, Any], artifacts: Path | None) -> None:
    """The pipeline run's own run, made once and named in run.json."""
    if "run_id" in recall(folder / "run.json"):
        return
    place = experiment(client, settings["exp_name"], artifacts)
    tags = {"mlflow.source.name": "dpo", "mlflow.source.type": "PROJECT", "pipeline_run": folder.name}
    if commit := settings.get("commit"):  # MLflow shows its own tag on a run's page, and not where runs are compared
        tags |= {"mlflow.source.git.commit": commit, "git_commit": commit[:12]}
    run_id = _made_once(client, place, folder, "run", folder.name, tags, settings.get("began"))
    _tolerant(_log_params, client, run_id, flatten(read_json(folder / "params.json")))
    client.log_artifact(run_id, str(folder / "params.json"))
    if (folder / CONFIGURATION).exists():
        client.log_artifact(run_id, str(folder / CONFIGURATION))
    address = redact(settings["tracking_uri"])
    write_json(folder / "run.json", {"experiment_id": place, "run_id": run_id, "tracking_uri": address})


def _child(client: Any, folder: Path, stage: str) -> str:
    file = folder / f"{stage}.run.json"
    if "run_id" not in recall(file):
        parent = read_json(folder / "run.json")
        first = next(iter(read_lines(folder / f"{stage}.jsonl")[0]), {})
        tags = {"mlflow.parentRunId": parent["run_id"], "mlflow.source.name": stage, "stage": stage}
        # The name says which run it belongs to: a chart of several runs shows nothing else.
        name = f"{stage} of {folder.name}"
        run_id = _made_once(client, parent["experiment_id"], folder, stage, name, tags, first.get("time"))
        write_json(file, {"run_id": run_id})
    return read_json(file)["run_id"]


def _made_once(
    client: Any, place: str, folder: Path, what: str, name: str, tags: dict[str, str], began: int | None
) -> str:
    """A new run, or the one that a forwarder made which died before it could note it."""
    marks = folder / "mark"
    before = marks.exists() and bool(marks.read_text().strip())
    if not before:
        write_text(marks, uuid.uuid4().hex)
    mark = fingerprint([marks.read_text(), what])
    found = client.search_runs([place], f"tags.`{MARK}` = '{mark}'", max_results=1) if before else []
    if found:
        return str(found[0].info.run_id)
    with without_retries():
        run = client.create_run(place, start_time=began, run_name=name, tags={**tags, MARK: mark})
    return str(run.info.run_id)


def name_of(name: str) -> str:
    """A param's or metric's name with nothing in it that MLflow refuses."""
    return NOT_IN_A_NAME.sub("_", name)
