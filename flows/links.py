"""Addresses of MLflow's pages. Without Prefect, whose import takes seconds: lists of runs need them too."""

import json
import os
from typing import Any
from urllib.parse import quote

from flows import services
from tasks.tracking.experiment import VIEW

TRAINING = "workflowType=machine_learning"  # otherwise MLflow may open the page for agents
MLFLOW_PAGE = "http://127.0.0.1:5000"  # where `make up` serves it, as a rule


def mlflow_link(ids: dict[str, Any], part: str = "") -> str | None:
    """A run's page, or a part of it: `/artifacts/report.html`, say."""
    if not ids:
        return None
    return f"{_page(ids)}/#/experiments/{ids['experiment_id']}/runs/{ids['run_id']}{part}?{TRAINING}"


def mlflow_home(ids: dict[str, Any]) -> str:
    """The page to begin with, where a run has no id yet."""
    return f"{_page(ids)}/#/experiments?{TRAINING}"


def runs_link(address: str, experiment: str = "1") -> str:
    """The list of an experiment's runs, in the view that tasks/tracking/experiment.py shares."""
    return f"{address}/#/experiments/{experiment}/runs?{TRAINING}&viewStateShareKey={VIEW}"


def curves_link(address: str, experiment: str = "1") -> str:
    """The same with the charts of the view: the curves of the newest runs, overlaid."""
    return f"{runs_link(address, experiment)}&compareRunsMode=CHART"


def _page(ids: dict[str, Any]) -> str:
    """Where a browser reaches MLflow. DPO_MLFLOW_UI_URL: the name that containers use leads nowhere outside of them."""
    if shown := os.environ.get("DPO_MLFLOW_UI_URL"):
        return shown.rstrip("/")
    address = str(ids.get("tracking_uri", ""))
    served = services.known("mlflow")
    local = served.address if served else MLFLOW_PAGE
    return address.rstrip("/") if address.startswith("http") else local


def compare_link(runs: list[dict[str, Any]]) -> str | None:
    """MLflow's page that puts these runs side by side."""
    if not runs:
        return None
    asked = {
        "runs": [ids["run_id"] for ids in runs],
        "experiments": sorted({str(ids["experiment_id"]) for ids in runs}),
    }
    query = "&".join(f"{name}={quote(json.dumps(values, separators=(',', ':')))}" for name, values in asked.items())
    return f"{_page(runs[0])}/#/compare-runs?{query}&{TRAINING}"
