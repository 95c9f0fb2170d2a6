"""URLs of MLflow's pages. Does not import Prefect or MLflow, so that `dpo runs` is fast."""

import json
import os
from typing import Any
from urllib.parse import quote

from services import background
from tasks.tracking.experiment import VIEW

TRAINING = "workflowType=machine_learning"  # without it MLflow may open its page for agents
MLFLOW_PAGE = "http://127.0.0.1:5000"  # the default of `dpo up`


def mlflow_link(ids: dict[str, Any], part: str = "") -> str | None:
    """A run's page, or a part of it such as `/artifacts/report.html`."""
    if not ids:
        return None
    return f"{_page(ids)}/#/experiments/{ids['experiment_id']}/runs/{ids['run_id']}{part}?{TRAINING}"


def needs_server(ids: dict[str, Any]) -> bool:
    """Whether the run's page needs the server of `dpo up`, which does not run."""
    return bool(ids) and not _external_page(ids) and background.running("mlflow") is None


def mlflow_home(settings: dict[str, Any]) -> str:
    """The list of experiments, for a run that has no id yet."""
    return f"{_page(settings)}/#/experiments?{TRAINING}"


def runs_link(address: str, experiment: str = "1") -> str:
    """An experiment's runs, in the view that tasks/tracking/experiment.py defines."""
    return f"{address}/#/experiments/{experiment}/runs?{TRAINING}&viewStateShareKey={VIEW}"


def curves_link(address: str) -> str:
    """The charts of that view: the curves of the newest runs, overlaid."""
    return f"{runs_link(address)}&compareRunsMode=CHART"


def _page(ids: dict[str, Any]) -> str:
    """Where a browser reaches MLflow. DPO_MLFLOW_UI_URL overrides it: containers use names unknown outside."""
    if page := _external_page(ids):
        return page
    server = background.last_started("mlflow")
    return server.address if server else MLFLOW_PAGE


def _external_page(ids: dict[str, Any]) -> str:
    """A server that we do not start; empty where the store is a file."""
    override, address = os.environ.get("DPO_MLFLOW_UI_URL"), str(ids.get("tracking_uri", ""))
    return (override or (address if address.startswith("http") else "")).rstrip("/")


def compare_link(runs: list[dict[str, Any]]) -> str | None:
    """MLflow's page that puts these runs side by side."""
    if not runs:
        return None
    experiments = sorted({str(ids["experiment_id"]) for ids in runs})
    lists = {"runs": [ids["run_id"] for ids in runs], "experiments": experiments}
    query = "&".join(f"{name}={quote(json.dumps(values, separators=(',', ':')))}" for name, values in lists.items())
    return f"{_page(runs[0])}/#/compare-runs?{query}&{TRAINING}"
