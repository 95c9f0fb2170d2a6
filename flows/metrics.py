"""`python -m flows.metrics --port 9464`: what an operator watches, as a Prometheus endpoint (docs/monitoring.md).

`make up`, compose and Kubernetes start it. A scrape asks Prefect's API and MLflow's registry and reads the journals of
the runs; nothing is stored. A source that does not answer gives `dpo_source_up 0`, and its metrics are absent.
"""

import argparse
import base64
import hmac
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from flows import activity, services
from flows.status import ask_api
from tasks.disk import mount_of
from tasks.errors import UserError
from tasks.files import home
from tasks.output import as_command
from tasks.params import Cluster, load_cluster, load_params
from tasks.redact import redact
from tasks.release import outbox

USER, PASSWORD = "reader", "DPO_METRICS_PASSWORD"
PATIENCE = 4.0  # seconds for an answer of Prefect or MLflow: Prometheus waits ten for ours
STATES = ("pending", "running", "paused", "cancelling", "completed", "failed", "crashed", "cancelled")
TRAINING = {  # of the journal of `train`, by our name for it
    "loss": "dpo_train_loss",
    "rewards/accuracies": "dpo_train_reward_accuracy",
    "rewards/margins": "dpo_train_reward_margin",
    "kl": "dpo_train_kl",
    "grad_norm": "dpo_train_grad_norm",
    "pairs_per_second": "dpo_train_pairs_per_second",
    "tokens_per_second": "dpo_train_tokens_per_second",
    "mfu": "dpo_train_mfu",
}
Metrics = list[GaugeMetricFamily]
Source = Callable[[], Metrics]


class Watched(Collector):
    """All sources, read anew at each scrape."""

    def __init__(self) -> None:
        self.journals, self.lock = activity.Journals(), threading.Lock()
        self.failing: dict[str, str] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        up = GaugeMetricFamily("dpo_source_up", "1: this source of metrics answered", labels=["source"])
        for name, found in self._all().items():
            up.add_metric([name], float(found is not None))
            yield from found or []
        yield up

    def _all(self) -> dict[str, Metrics | None]:
        try:
            cluster = load_cluster(home())
        except Exception as error:
            self._say_failed("configuration", error)
            return {"configuration": None}
        self.failing.pop("configuration", None)
        sources: dict[str, Source] = {
            "prefect": flow_runs,
            "mlflow": lambda: champions(cluster),
            "runs": lambda: self._runs(cluster),
        }
        with ThreadPoolExecutor(len(sources)) as pool:  # two that hang cost as much time as one
            asked = {name: pool.submit(self._read, name, source) for name, source in sources.items()}
        return {"configuration": [], **{name: found.result() for name, found in asked.items()}}

    def _read(self, name: str, source: Source) -> Metrics | None:
        try:
            found = source()
        except Exception as error:
            self._say_failed(name, error)
            return None
        if self.failing.pop(name, None):
            print(f"metrics: {name} can be read again", flush=True)
        return found

    def _say_failed(self, name: str, error: Exception) -> None:
        """Said once and not at each scrape."""
        why = redact((str(error).splitlines() or [type(error).__name__])[0][:300])
        if self.failing.get(name) != why:
            print(f"metrics: {name} could not be read: {why}", file=sys.stderr, flush=True)
        self.failing[name] = why

    def _runs(self, cluster: Cluster) -> Metrics:
        runs = home() / cluster.logging_dir
        with self.lock:
            working = self.journals.working(runs)
        disk = shutil.disk_usage(mount_of(home() / cluster.output_dir))
        waiting = len(list(outbox.folder().glob("*.json")))
        return [
            *stages(working),
            gauge("dpo_unsent_journal_lines", "Journal lines that MLflow has not got yet", activity.unsent_lines(runs)),
            gauge("dpo_outbox_promotions", "Promotions not yet copied or told to Prefect", waiting),
            gauge("dpo_output_dir_free_bytes", "Free space of output_dir", disk.free),
            gauge("dpo_output_dir_size_bytes", "Size of output_dir's file system", disk.total),
        ]


def gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, value=value)


def by(name: str, about: str, labels: list[str], rows: Iterable[tuple[list[str], float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, about, labels=labels)
    for values, number in rows:
        family.add_metric([redact(value) for value in values], number)
    return family


def stages(working: list[activity.Stage]) -> Metrics:
    both, units = ["run", "stage"], ["run", "stage", "unit"]
    counted = [stage for stage in working if stage.total]
    found = [
        by(
            "dpo_stage_started_timestamp_seconds",
            "When a stage at work began",
            both,
            [([one.run, one.name], one.since) for one in working],
        ),
        by(
            "dpo_stage_logged_timestamp_seconds",
            "When a stage at work last logged a step or its progress",
            both,
            [([one.run, one.name], one.logged) for one in working],
        ),
        by(
            "dpo_stage_done",
            "Steps, pairs or answers that a stage at work has done",
            units,
            [([one.run, one.name, one.unit], one.done) for one in counted],
        ),
        by(
            "dpo_stage_total",
            "Steps, pairs or answers that a stage at work has to do",
            units,
            [([one.run, one.name, one.unit], one.total) for one in counted],
        ),
    ]
    trainings = [stage for stage in working if stage.name == "train"]
    return found + [
        by(
            name,
            f"{key} at the last logged step of training",
            ["run"],
            [([one.run], one.values[key]) for one in trainings if key in one.values],
        )
        for key, name in TRAINING.items()
    ]


def flow_runs() -> Metrics:
    """Counted by Prefect. A scheduled run is queued once its time has come."""
    access = _prefect()
    due = {
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "expected_start_time": {"before_": datetime.now(UTC).isoformat()},
    }
    asked = {"queued": due, **{name: {"state": {"type": {"any_": [name.upper()]}}} for name in STATES}}
    counts = {
        name: ask_api(access, "flow_runs/count", {"flow_runs": which}, timeout=PATIENCE)
        for name, which in asked.items()
    }
    return [by("dpo_flow_runs", "Flow runs by state", ["state"], [([name], count) for name, count in counts.items()])]


def _prefect() -> Mapping[str, str]:
    if os.environ.get("PREFECT_API_URL"):
        return os.environ
    if server := services.running("prefect"):  # asked each time: `make up` may bring it back on another port
        return services.prefect_access(server)
    raise UserError("PREFECT_API_URL names no server, and `make up` has not started one")


def champions(cluster: Cluster) -> Metrics:
    from tasks.tracking import registry

    gate = load_params(home() / "params.yaml").promote
    names = [*gate.require, *gate.limits, *gate.max_regression]
    found = registry.champions(_mlflow(cluster), gate.alias, names)
    return [
        by(
            "dpo_champion_version",
            "Version of the model that is champion",
            ["model", "run"],
            [([one.model, one.run], float(one.version)) for one in found],
        ),
        by(
            "dpo_champion_registered_timestamp_seconds",
            "When that version was registered",
            ["model"],
            [([one.model], one.since) for one in found],
        ),
        by(
            "dpo_champion_metric",
            "The champion's metrics that the gate (promote in params.yaml) names",
            ["model", "version", "metric"],
            [([one.model, one.version, name], value) for one in found for name, value in one.metrics.items()],
        ),
    ]


def _mlflow(cluster: Cluster) -> str:
    if cluster.tracking_uri.startswith("http"):
        return cluster.tracking_uri
    if server := services.running("mlflow"):
        return server.address
    raise UserError("MLflow's server does not run; `make up` starts it")


def application(registry: CollectorRegistry, password: str) -> Any:
    """/metrics for whoever has the login, /health for all."""
    scrape = make_wsgi_app(registry)
    login = "Basic " + base64.b64encode(f"{USER}:{password}".encode()).decode()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            if hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), login.encode()):
                return scrape(environ, start)
            start("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="metrics"')])
            return [b"A login is needed: docs/monitoring.md\n"]
        known = path == "/health"
        start("200 OK" if known else "404 Not Found", [("Content-Type", "text/plain")])
        return [b"ok\n" if known else b"Try /metrics\n"]

    return answer


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(host: str, port: int, password: str) -> WSGIServer:
    registry = CollectorRegistry()
    registry.register(Watched())
    kind = type("Server6", (Server,), {"address_family": socket.AF_INET6}) if ":" in host else Server
    return make_server(host, port, application(registry, password), kind, Quiet)


@as_command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.metrics", description="a Prometheus endpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9464)
    asked = parser.parse_args()
    password = os.environ.get(PASSWORD)
    if not password:
        raise UserError(f"{PASSWORD} is not set: Prometheus logs in as {USER} with it. `make up` sets it by itself.")
    os.environ |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(int(PATIENCE)), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    with serve(asked.host, asked.port, password) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
