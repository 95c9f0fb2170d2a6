"""Pipeline runs that another flow (`sweep`, `rounds`) starts as child processes: their commands and environment."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

from flows import cancellation, embedded_server
from services.prefect_internals import OWN_VARIABLES
from tasks.config.paths import ROOT
from tasks.config.strict import to_yaml
from tasks.system import processes


def run_command(name: str, recipe: str | None, overrides: Mapping[str, Any]) -> list[str]:
    options = ["--recipe", recipe] if recipe else []
    for key, value in overrides.items():
        options += ["--set", f"{key}={to_yaml(value)}"]
    return [sys.executable, "-m", "cli", "run", "--name", name, *options]


def resume_command(name: str) -> list[str]:
    return [sys.executable, "-m", "cli", "resume", name]


def execute(command: list[str], tags: Mapping[str, str]) -> int:
    """Run the command and log its output; its exit code."""
    log, env = get_run_logger(), environment(tags)
    if embedded_server.embedded():  # the run must not wait for approval on a server that nobody can open
        del env["PREFECT_API_URL"]
    code = processes.run(command, ROOT, env, lambda line: log.info("%s", line))
    cancellation.stop_if_noticed()
    return code


def environment(tags: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run on our Prefect server, without what identifies this process's own run."""
    keep = ("DPO_CLUSTER", "DPO_MLFLOW_")
    clean = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(keep) or not name.startswith(("DPO_", OWN_VARIABLES))
    }
    login = PREFECT_API_AUTH_STRING.value()
    api = {"PREFECT_API_URL": PREFECT_API_URL.value() or "", **({"PREFECT_API_AUTH_STRING": login} if login else {})}
    return {**clean, **api, "PYTHONUNBUFFERED": "1", "DPO_TAGS": json.dumps(dict(tags))}
