"""What this run talks to: ports of its pages, the tracking server, the hub, DVC's remotes, and the clocks of these."""

import email.utils
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlparse

import psutil

from tasks.doctor.findings import Findings, within
from tasks.files import home
from tasks.models import HUB, hub_address, hub_snapshot
from tasks.params import Cluster, Params
from tasks.tracking.journal import absolute, unsent

SECONDS = 5.0
SKEW = 60.0  # seconds; at fifteen minutes S3 refuses requests
PAGES = (
    ("MLflow's pages", "PORT", 5000, "make up PORT="),
    ("Prefect's server", "PREFECT_PORT", 4200, "make up PREFECT_PORT="),
)
WELL_KNOWN = {"http": 80, "https": 443, "ssh": 22, "postgresql": 5432, "mysql": 3306}


def ports(found: Findings) -> None:
    for what, variable, usual, instead in PAGES:
        port = int(os.environ.get(variable) or usual)
        if _free(port):
            found.good(f"port {port} is free for {what}")
            continue
        who = _listener(port)
        if who and any(name in who for name in ("mlflow", "prefect", "uvicorn")):
            found.good(f"port {port}: {what} seem to be up ({who})")
        else:
            found.note(
                f"port {port} of {what} is taken by {who or 'a process of somebody else'}: `{instead}{port + 1}`"
            )


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _listener(port: int) -> str | None:
    """Who listens there, as far as this user may know."""
    try:
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        pid = next((one.pid for one in listening if one.laddr and one.laddr[1] == port and one.pid), None)
        return f"process {pid}, `{' '.join(psutil.Process(pid).cmdline())[:80]}`" if pid else None
    except psutil.Error:
        return None


def tracking(found: Findings, cluster: Cluster) -> None:
    uri = absolute(cluster.tracking_uri)
    if uri.startswith("sqlite:///"):
        _writable(found, Path(uri.removeprefix("sqlite:///")))
    elif uri.startswith("http"):
        _server(found, uri)
    else:
        _reachable(found, uri, "tracking_uri in infra/cluster.yaml")
    runs = home() / cluster.logging_dir
    waiting = [path.name for path in sorted(runs.glob("*/")) if unsent(path)]
    if waiting:
        found.note(f"MLflow has not got all of {len(waiting)} runs ({', '.join(waiting[:3])}): `make sync` sends it")


def _writable(found: Findings, file: Path) -> None:
    place = next(path for path in (file, *file.parents) if path.exists())
    if os.access(place, os.W_OK):
        found.good(f"MLflow's store is {file}")
    else:
        found.wrong(
            f"{place} cannot be written, and MLflow's store is to be {file}. Mend its permissions, or tracking_uri."
        )


def _server(found: Findings, uri: str) -> None:
    answer = within(2 * SECONDS, lambda: _get(f"{uri.rstrip('/')}/version"))
    if isinstance(answer, Exception):
        found.wrong(
            f"the tracking server {uri} does not answer ({_why(answer)}). Start it or mend tracking_uri in "
            "infra/cluster.yaml; a run goes on without it, and `make sync` sends its figures later."
        )
        return
    there, here = answer[0].strip(), version("mlflow")
    found.good(f"the tracking server {uri} answers, MLflow {there}")
    if there.split(".")[0].isdecimal() and there.split(".")[0] != here.split(".")[0]:
        found.wrong(
            f"the tracking server has MLflow {there} and this environment {here}. Install the same major version."
        )
    _clock(found, uri, answer[1])


def hub(found: Findings, params: Params) -> None:
    """Models and data sets of the hub: in the cache, or to be had."""
    for key, address, kind in _hub_addresses(params):
        name, revision = hub_address(address.partition("?")[0])
        if kind == "models" and _cached(name, revision):
            found.good(f"{key}: {name} is in the hub's cache")
        else:
            _ask_hub(found, key, kind, name)


def _hub_addresses(params: Params) -> list[tuple[str, str, str]]:
    source = params.source
    data = [source.data] if isinstance(source.data, str) else [one.data for one in source.data]
    every = [("source.data", address, "datasets") for address in data]
    every += [("source.eval", source.eval or "", "datasets"), ("source.model", source.model, "models")]
    return [one for one in every if one[1].startswith(HUB)]


def _cached(name: str, revision: str | None) -> bool:
    try:
        return hub_snapshot(name, revision, local_files_only=True).exists()
    except Exception:
        return False


def _ask_hub(found: Findings, key: str, kind: str, name: str) -> None:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        found.wrong(f"{key}: {name} is not in the hub's cache, and HF_HUB_OFFLINE is set. Unset it, or give a folder.")
        return
    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    answer = within(2 * SECONDS, lambda: _get(f"{constants.ENDPOINT}/api/{kind}/{name}", headers))
    if isinstance(answer, urllib.error.HTTPError) and answer.code in (401, 403, 404):
        found.wrong(
            f"{key}: the hub has no {name} for you ({answer.code}). Check the name; of a gated one accept the terms on "
            "its page, and set HF_TOKEN."
        )
    elif isinstance(answer, Exception):
        found.wrong(
            f"{key}: {constants.ENDPOINT} does not answer ({_why(answer)}), and {name} is not in its cache. Check your "
            "network and proxy, or give a local folder."
        )
    else:
        found.good(f"{key}: the hub has {name}")
        _clock(found, constants.ENDPOINT, answer[1])


def remotes(found: Findings, root: Path) -> None:
    """Whether DVC's remotes can be reached; a local one must be a folder."""
    for name, options in _remotes(root).items():
        url = options.get("endpointurl") or options["url"]
        if "://" in url:
            _reachable(found, url, f"DVC's remote {name}")
            continue
        folder = (root / ".dvc" / url).resolve()
        if folder.is_dir() and os.access(folder, os.W_OK):
            found.good(f"DVC's remote {name} is {folder}")
        else:
            found.wrong(
                f"DVC's remote {name} is to be {folder}, which cannot be written. Make it, or `dvc remote modify`."
            )


def _remotes(root: Path) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-m", "dvc", "config", "--list"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {}
    found: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        kind, _, rest = key.strip().partition(".")
        name, _, option = rest.rpartition(".")
        if kind == "remote" and name:
            found.setdefault(name, {})[option] = value.strip()
    return {name: options for name, options in found.items() if "url" in options}


def _reachable(found: Findings, url: str, what: str) -> None:
    """That somebody listens behind an address; what they would say of our credentials is theirs to say."""
    parts = urlparse(url)
    scheme = parts.scheme.split("+")[0]
    port = parts.port or WELL_KNOWN.get(scheme)
    if not parts.hostname or port is None:
        found.note(f"{what} ({url}) cannot be tried without sending something: `dvc push` will say")
        return
    host = parts.hostname
    answer = within(2 * SECONDS, lambda: socket.create_connection((host, port), SECONDS).close())
    if isinstance(answer, Exception):
        found.wrong(f"{what} ({url}) does not answer ({_why(answer)}). Check the address, your network and its server.")
    else:
        found.good(f"{what} ({url}) answers")


def _clock(found: Findings, where: str, date: str | None) -> None:
    """Signed requests and the times of figures need clocks that agree."""
    there = email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()
    if abs(skew := time.time() - there) > SKEW:
        late = "ahead of" if skew > 0 else "behind"
        found.wrong(f"this machine's clock is {abs(skew):.0f} s {late} {where}. Set it: `timedatectl set-ntp true`.")


def _get(url: str, headers: dict[str, str] | None = None) -> tuple[str, str | None]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=SECONDS) as answer:
        return answer.read(1000).decode(errors="replace"), answer.headers.get("Date")


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return str(reason).splitlines()[0] if str(reason) else type(error).__name__
