"""A Prometheus endpoint (docs/monitoring.md): `python -m services.metrics_endpoint --port 9464`.

`dpo up`, compose and Kubernetes start it. Each scrape queries Prefect's API and MLflow's registry and reads the
journals of the runs; nothing is stored. If a source fails, `dpo_source_up` is 0 and its metrics are absent.
"""

import argparse
import hmac
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from services import background, prefect_api, stage_activity
from services.http_app import plain_app, run
from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import load_params
from tasks.config.paths import main_checkout
from tasks.errors import UserError
from tasks.promote import outbox
from tasks.secrets.redact import redact
from tasks.system.commands import as_command
from tasks.system.disk import mount_of
from tasks.tracking import registry as model_registry

USER, PASSWORD = "reader", "DPO_METRICS_PASSWORD"
TIMEOUT = 4.0  # seconds for a response of Prefect or MLflow; Prometheus itself gives up after ten
STATES = ("pending", "running", "paused", "cancelling", "completed", "failed", "crashed", "cancelled")
TRAINING = {  # by their names in the journal of `train`
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
Labels = dict[str, str]
T = TypeVar("T")


class PipelineCollector(Collector):
    """Reads all sources at each scrape."""

    def __init__(self) -> None:
        self.journals, self.lock = stage_activity.Journals(), threading.Lock()
        self.errors: dict[str, str] = {}  # last message by source, so that it is printed once

    def collect(self) -> Iterator[GaugeMetricFamily]:
        results = self._read_all()
        up = [({"source": name}, float(metrics is not None)) for name, metrics in results.items()]
        for metrics in results.values():
            yield from metrics or []
        yield gauge("dpo_source_up", "1 if this source of metrics responded", up)

    def _read_all(self) -> dict[str, Metrics | None]:
        cluster = self._read("configuration", lambda: load_cluster(main_checkout()))
        if cluster is None:
            return {"configuration": None}
        sources: dict[str, Source] = {
            "prefect": flow_runs,
            "mlflow": lambda: champions(cluster),
            "runs": lambda: self._runs(cluster),
        }
        with ThreadPoolExecutor(len(sources)) as pool:  # so that two timeouts take no longer than one
            futures = {name: pool.submit(self._read, name, source) for name, source in sources.items()}
        return {"configuration": [], **{name: future.result() for name, future in futures.items()}}

    def _read(self, name: str, source: Callable[[], T]) -> T | None:
        """What the source returns; None, and a message, if it fails."""
        try:
            content = source()
        except Exception as error:
            reason = redact((str(error).splitlines() or [type(error).__name__])[0][:300])
            if self.errors.get(name) != reason:
                print(f"metrics: {name} could not be read: {reason}", file=sys.stderr, flush=True)
            self.errors[name] = reason
            return None
        if self.errors.pop(name, None):
            print(f"metrics: {name} can be read again", flush=True)
        return content

    def _runs(self, cluster: Cluster) -> Metrics:
        runs = main_checkout() / cluster.logging_dir
        with self.lock:
            stages = self.journals.active_stages(runs)
        unsent, waiting = stage_activity.unsent_lines(runs), len(list(outbox.folder().glob("*.json")))
        disk = shutil.disk_usage(mount_of(main_checkout() / cluster.output_dir))
        return [
            *stage_metrics(stages),
            gauge("dpo_unsent_journal_lines", "Journal lines that MLflow has not received yet", unsent),
            gauge("dpo_outbox_promotions", "Promotions not yet copied or reported to Prefect", waiting),
            gauge("dpo_output_dir_free_bytes", "Free space of output_dir", disk.free),
            gauge("dpo_output_dir_size_bytes", "Size of output_dir's file system", disk.total),
        ]


def gauge(name: str, description: str, samples: float | Iterable[tuple[Labels, float]]) -> GaugeMetricFamily:
    """One value, or one for each set of labels."""
    if isinstance(samples, int | float):
        return GaugeMetricFamily(name, description, value=samples)
    family = GaugeMetricFamily(name, description, labels=[])
    for labels, value in samples:
        family.add_sample(name, {label: redact(text) for label, text in labels.items()}, value)
    return family


def stage_metrics(stages: list[stage_activity.Stage]) -> Metrics:
    labels = [({"run": stage.run, "stage": stage.name}, stage) for stage in stages]
    counted = [({**names, "unit": stage.unit}, stage) for names, stage in labels if stage.total]
    started = [(names, stage.since) for names, stage in labels]
    logged = [(names, stage.logged) for names, stage in labels]
    done = [(names, float(stage.done)) for names, stage in counted]
    total = [(names, float(stage.total)) for names, stage in counted]
    metrics = [
        gauge("dpo_stage_started_timestamp_seconds", "When an active stage started", started),
        gauge("dpo_stage_logged_timestamp_seconds", "When an active stage last logged a step or progress", logged),
        gauge("dpo_stage_done", "Steps, pairs or answers that an active stage has completed", done),
        gauge("dpo_stage_total", "Steps, pairs or answers of an active stage in total", total),
    ]
    trainings = [stage for stage in stages if stage.name == "train"]
    for key, name in TRAINING.items():
        values = [({"run": stage.run}, stage.values[key]) for stage in trainings if key in stage.values]
        metrics.append(gauge(name, f"{key} at the last logged training step", values))
    return metrics


def flow_runs() -> Metrics:
    """Counted by Prefect. A scheduled run counts as queued once its start time has passed."""
    access = _prefect_access()
    due = {"before_": datetime.now(UTC).isoformat()}
    conditions: dict[str, dict[str, Any]] = {name: {"state": {"type": {"any_": [name.upper()]}}} for name in STATES}
    conditions["queued"] = {"state": {"type": {"any_": ["SCHEDULED"]}}, "expected_start_time": due}
    counts = [
        ({"state": name}, prefect_api.post(access, "flow_runs/count", {"flow_runs": condition}, TIMEOUT))
        for name, condition in conditions.items()
    ]
    return [gauge("dpo_flow_runs", "Flow runs by state", counts)]


def _prefect_access() -> Mapping[str, str]:
    if os.environ.get("PREFECT_API_URL"):
        return os.environ
    if server := background.running("prefect"):  # looked up each time: `dpo up` may restart it on another port
        return prefect_api.access_variables(server)
    raise UserError("PREFECT_API_URL is not set, and no Prefect server of `dpo up` is running")


def champions(cluster: Cluster) -> Metrics:
    gate = load_params(main_checkout() / "params.yaml").promote
    names = [*gate.require, *gate.limits, *gate.max_regression]
    models = model_registry.champions(_mlflow_address(cluster), gate.alias, names)
    versions = [({"model": entry.model, "run": entry.run}, float(entry.version)) for entry in models]
    registered = [({"model": entry.model}, entry.since) for entry in models]
    values = [
        ({"model": entry.model, "version": entry.version, "metric": name}, value)
        for entry in models
        for name, value in entry.metrics.items()
    ]
    return [
        gauge("dpo_champion_version", "Version of the champion", versions),
        gauge("dpo_champion_registered_timestamp_seconds", "When that version was registered", registered),
        gauge("dpo_champion_metric", "The champion's metrics that the gate (promote in params.yaml) uses", values),
    ]


def _mlflow_address(cluster: Cluster) -> str:
    if cluster.tracking_uri.startswith("http"):
        return cluster.tracking_uri
    if server := background.running("mlflow"):
        return server.address
    raise UserError("the MLflow server is not running; `dpo up` starts it")


def application(registry: CollectorRegistry, password: str) -> FastAPI:
    """/metrics requires the login, /health does not."""
    app, login = plain_app(), prefect_api.basic(f"{USER}:{password}")

    @app.get("/metrics")
    def metrics(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), login.encode()):
            needed = {"WWW-Authenticate": 'Basic realm="metrics"'}
            return PlainTextResponse("A login is required: docs/monitoring.md\n", 401, needed)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    @app.api_route("/health", methods=["GET", "HEAD"])  # some probes ask with HEAD
    def health() -> Response:
        return PlainTextResponse("ok\n")

    return app


@as_command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.metrics_endpoint", description="a Prometheus endpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9464)
    arguments = parser.parse_args()
    password = os.environ.get(PASSWORD)
    if not password:
        raise UserError(f"{PASSWORD} is not set: Prometheus logs in as {USER} with it. `dpo up` sets it automatically.")
    os.environ |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": str(int(TIMEOUT)), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    registry = CollectorRegistry()
    registry.register(PipelineCollector())
    app = application(registry, password)
    run(app, arguments.host, arguments.port)


if __name__ == "__main__":
    main()
