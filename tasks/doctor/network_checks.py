"""The tracking server, its clock, and DVC's remotes. A run's first stage asks the hub, and says what is wrong there."""

import email.utils
import os
import socket
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlparse

from tasks.config.cluster import Cluster
from tasks.config.paths import main_checkout
from tasks.doctor.report import Report, within
from tasks.runs import dvc
from tasks.tracking.journal_reader import unsent
from tasks.tracking.mlflow_client import absolute_uri, database

SECONDS = 5.0
SKEW = 60.0  # seconds; at fifteen minutes S3 refuses requests
WELL_KNOWN = {"http": 80, "https": 443, "ssh": 22, "postgresql": 5432, "mysql": 3306}


def tracking(report: Report, cluster: Cluster) -> None:
    uri = absolute_uri(cluster.tracking_uri)
    if file := database(uri):
        _writable(report, file)
    elif uri.startswith("http"):
        _server(report, uri)
    else:
        _reachable(report, uri, "tracking_uri in infra/cluster.yaml")
    runs = main_checkout() / cluster.logging_dir
    waiting = [path.name for path in sorted(runs.glob("*/")) if unsent(path)]
    if waiting:
        report.note(f"{len(waiting)} runs have metrics that MLflow lacks ({', '.join(waiting[:3])}): run `dpo sync`")


def _writable(report: Report, file: Path) -> None:
    existing = next(path for path in (file, *file.parents) if path.exists())
    problem = f"{existing} is not writable, and MLflow's store is {file}. Correct its permissions, or tracking_uri."
    report.check(os.access(existing, os.W_OK), f"MLflow's store is {file}", problem)


def _server(report: Report, uri: str) -> None:
    answer = within(2 * SECONDS, lambda: _get(f"{uri.rstrip('/')}/version"))
    if isinstance(answer, Exception):
        report.wrong(
            f"the tracking server {uri} does not answer ({_reason(answer)}). Start it or correct tracking_uri in "
            "infra/cluster.yaml. A run continues without it, and `dpo sync` sends its metrics later."
        )
        return
    remote, local = answer[0].strip(), version("mlflow")
    report.ok(f"the tracking server {uri} answers, MLflow {remote}")
    if remote.split(".")[0].isdecimal() and remote.split(".")[0] != local.split(".")[0]:
        problem = f"the tracking server has MLflow {remote}, and this environment has {local}"
        report.wrong(f"{problem}. Install the same major version.")
    _clock(report, uri, answer[1])


def remotes(report: Report, root: Path) -> None:
    """Whether DVC's remotes are reachable; a local one must be a writable folder."""
    for name, options in dvc.remotes(root).items():
        url = options.get("endpointurl") or options["url"]
        if "://" in url:
            _reachable(report, url, f"DVC's remote {name}")
            continue
        folder = (root / ".dvc" / url).resolve()
        sentence = f"DVC's remote {name} is {folder}"
        problem = f"{sentence}, which is not writable. Create it, or run `dvc remote modify`."
        report.check(folder.is_dir() and os.access(folder, os.W_OK), sentence, problem)


def _reachable(report: Report, url: str, name: str) -> None:
    """Whether a server listens at the address; credentials are not checked."""
    parts = urlparse(url)
    scheme = parts.scheme.split("+")[0]
    port = parts.port or WELL_KNOWN.get(scheme)
    if not parts.hostname or port is None:
        report.note(f"{name} ({url}) cannot be checked without sending data: run `dvc push`")
        return
    host = parts.hostname
    answer = within(2 * SECONDS, lambda: socket.create_connection((host, port), SECONDS).close())
    if isinstance(answer, Exception):
        problem = f"{name} ({url}) does not answer ({_reason(answer)})"
        report.wrong(f"{problem}. Check the address, your network and the server.")
    else:
        report.ok(f"{name} ({url}) answers")


def _clock(report: Report, server: str, date: str | None) -> None:
    """Signed requests and the times of metrics need clocks that agree."""
    server_time = email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()
    if abs(skew := time.time() - server_time) > SKEW:
        direction = "ahead of" if skew > 0 else "behind"
        report.wrong(
            f"this machine's clock is {abs(skew):.0f} s {direction} {server}. Set it: `timedatectl set-ntp true`."
        )


def _get(url: str) -> tuple[str, str | None]:
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return answer.read(1000).decode(errors="replace"), answer.headers.get("Date")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return str(reason).splitlines()[0] if str(reason) else type(error).__name__
