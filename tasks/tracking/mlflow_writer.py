"""Writes the lines of a journal to MLflow.

Any line may come twice: an uploader that dies between sending a line and recording that sends it again. So a run is
looked up by its mark, a metric carries the time of its line (MLflow stores equal name, step, time and value as one
point), and a final value that MLflow already has is not logged again.
"""

import json
import re
import sys
import uuid
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tasks.secrets.redact import redact
from tasks.system.files import fingerprint, read_json, read_json_or_empty, write_json, write_text
from tasks.system.lock import file_lock
from tasks.tracking.experiment import experiment_id
from tasks.tracking.journal import FLOW, flatten
from tasks.tracking.journal_reader import Line, read_journal, read_lines
from tasks.tracking.mlflow_client import CONFIGURATION, database, without_retries

DIGITS = 5  # significant digits of a parent run's metrics: MLflow's list of runs shows all that are stored
NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")
LOCAL = {"progress", "note", "memory"}  # lines that MLflow does not get
JOURNAL_TAG = "mlflow.journal"  # tag that identifies a run; MLflow does not show tags with this prefix
REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST"}  # permanently: a retry does not help


def open_store(folder: Path) -> Any:
    """A client of the run's tracking store, which has the run."""
    from mlflow import MlflowClient

    settings = read_json(folder / "settings.json")
    uri = settings["tracking_uri"]
    file = database(uri)
    with file_lock((file.parent if file else folder) / "store.lock"):  # one process alone creates a SQLite file
        client = MlflowClient(uri, registry_uri=uri)
        _create_parent(client, folder, settings, file.parent / "artifacts" if file else None)
    return client


def record(client: Any, folder: Path, stage: str, lines: Sequence[Line]) -> None:
    """Send consecutive metrics in one call, since the server may be slow."""
    shown = (line for line in lines if line["kind"] not in LOCAL)
    for are_metrics, group in groupby(shown, key=lambda line: line["kind"] == "metrics"):
        if are_metrics:
            _log_curves(client, folder, stage, list(group))
        else:
            for line in group:
                _tolerant(_apply, client, folder, stage, line)


def _log_curves(client: Any, folder: Path, stage: str, lines: Sequence[Line]) -> None:
    """On the stage's run in full precision, and on the parent, because MLflow's list and charts show parents."""
    if stage != FLOW:
        _log_metrics(client, _child(client, folder, stage), lines)
    rounded = [{**line, "values": _rounded(line["values"])} for line in lines]
    _log_metrics(client, read_json(folder / "run.json")["run_id"], rounded)


def _tolerant(function: Any, *arguments: Any) -> None:
    """Print and skip what MLflow refuses permanently (a deleted run, for example) instead of retrying for ever."""
    from mlflow.exceptions import MlflowException, RestException

    try:
        function(*arguments)
    except MlflowException as error:
        from_proxy = not isinstance(error, RestException) and "API request" in str(error)  # its 404, not MLflow's
        if error.error_code not in REFUSED or from_proxy:
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
            # A final value of a metric that the stage also logged by step would be a stray point of its curve.
            stepped = {} if stage == FLOW else read_journal(folder / f"{stage}.jsonl")[1].steps
            values = {name: value for name, value in line["values"].items() if name not in stepped}
            _log_final(client, parent, {**line, "values": _rounded(values)})
            if stage != FLOW:
                _log_final(client, runs[0], {**line, "values": values})
        case "tags":
            _set_tags(client, parent, line["values"])
        case "dataset":
            for run_id in runs:
                _log_dataset(client, run_id, line)
        case "artifact":
            if Path(line["path"]).exists():
                client.log_artifact(runs[0], line["path"])
        case "end":
            status = line["status"]
            if stage != FLOW:
                client.set_tag(parent, f"stage.{stage}", "ran" if status == "FINISHED" else status.lower())
            for run_id in runs:
                client.set_terminated(run_id, status, end_time=line["time"])  # when it ended, not when we send it


def _log_params(client: Any, run_id: str, values: dict[str, Any]) -> None:
    from mlflow.entities import Param

    texts = {name_of(name): redact(str(value)) for name, value in values.items()}
    known = client.get_run(run_id).data.params  # a repeated stage may not change a logged param
    new = [Param(name, text) for name, text in texts.items() if name not in known]  # MLflow cuts long ones
    client.log_batch(run_id, params=new)


def _log_metrics(client: Any, run_id: str, lines: Sequence[Line]) -> None:
    from mlflow.entities import Metric

    points = [
        Metric(name_of(name), float(value), line["time"], line.get("step", 0))
        for line in lines
        for name, value in line["values"].items()
    ]
    _tolerant(client.log_batch, run_id, points)


def _log_final(client: Any, run_id: str, line: Line) -> None:
    """Metrics of a run as a whole: one point each."""
    known = client.get_run(run_id).data.metrics
    new = {name: value for name, value in line["values"].items() if known.get(name_of(name)) != value}
    _log_metrics(client, run_id, [{**line, "values": new, "step": line.get("at", 0)}])


def _rounded(values: dict[str, float]) -> dict[str, float]:
    """Counts stay exact."""
    numbers = {name: float(value) for name, value in values.items()}
    return {name: n if n.is_integer() else float(f"{n:.{DIGITS}g}") for name, n in numbers.items()}


def _set_tags(client: Any, run_id: str, values: dict[str, Any]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(name_of(name), redact(str(value))) for name, value in values.items()])


def _log_dataset(client: Any, run_id: str, line: Line) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source, rows = json.dumps({"uri": redact(line["source"])}), line.get("rows")
    profile = json.dumps({"num_rows": rows}) if rows is not None else None
    data = Dataset(line["name"], line["digest"][:32], "local", source, profile=profile)
    client.log_inputs(run_id, [DatasetInput(data, [InputTag("mlflow.data.context", line["name"])])])


def _create_parent(client: Any, folder: Path, settings: dict[str, Any], artifacts: Path | None) -> None:
    """The pipeline run's own run, created once and named in run.json."""
    if "run_id" in read_json_or_empty(folder / "run.json"):
        return
    experiment = experiment_id(client, settings["exp_name"], artifacts)
    tags = {"mlflow.source.name": "dpo", "mlflow.source.type": "PROJECT", "pipeline_run": folder.name}
    if commit := settings.get("commit"):  # MLflow shows its own tag on a run's page, and not where runs are compared
        tags |= {"mlflow.source.git.commit": commit, "git_commit": commit[:12]}
    run_id = _create_once(client, experiment, folder, "run", folder.name, tags, settings.get("began"))
    _tolerant(_log_params, client, run_id, flatten(read_json(folder / "params.json")))
    client.log_artifact(run_id, str(folder / "params.json"))
    if (folder / CONFIGURATION).exists():
        client.log_artifact(run_id, str(folder / CONFIGURATION))
    address = redact(settings["tracking_uri"])
    write_json(folder / "run.json", {"experiment_id": experiment, "run_id": run_id, "tracking_uri": address})


def _child(client: Any, folder: Path, stage: str) -> str:
    """The id of a stage's run, created at first use."""
    file = folder / f"{stage}.run.json"
    if "run_id" not in read_json_or_empty(file):
        parent = read_json(folder / "run.json")
        first = next(iter(read_lines(folder / f"{stage}.jsonl")[0]), {})
        tags = {"mlflow.parentRunId": parent["run_id"], "mlflow.source.name": stage, "stage": stage}
        name = f"{stage} of {folder.name}"  # with the pipeline run: a chart of several runs shows nothing else
        run_id = _create_once(client, parent["experiment_id"], folder, stage, name, tags, first.get("time"))
        write_json(file, {"run_id": run_id})
    return read_json(file)["run_id"]


def _create_once(
    client: Any, experiment: str, folder: Path, key: str, name: str, tags: dict[str, str], began: int | None
) -> str:
    """A new run, or the run of an uploader that died between creating it and recording its id."""
    marks = folder / "mark"
    is_new = not marks.exists()
    if is_new:
        write_text(marks, uuid.uuid4().hex)
    mark = fingerprint([marks.read_text(), key])
    runs = [] if is_new else client.search_runs([experiment], f"tags.`{JOURNAL_TAG}` = '{mark}'", max_results=1)
    if runs:
        return str(runs[0].info.run_id)
    with without_retries():
        run = client.create_run(experiment, start_time=began, run_name=name, tags={**tags, JOURNAL_TAG: mark})
    return str(run.info.run_id)


def name_of(name: str) -> str:
    """The name of a param or metric without the characters that MLflow refuses."""
    return NOT_IN_A_NAME.sub("_", name)
