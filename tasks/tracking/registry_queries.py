"""Questions to MLflow about all models and runs: the champions, and the runs with a tag. Only reads."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tasks.config.params import Cluster
from tasks.errors import UserError
from tasks.tracking.mlflow_client import absolute_uri, log_in
from tasks.tracking.registry import open_client


@dataclass(frozen=True)
class Champion:
    model: str
    version: str
    run: str  # that made it
    since: float  # when it was registered, seconds since the epoch
    metrics: Mapping[str, float]


def champions(uri: str, alias: str, metrics: Sequence[str]) -> list[Champion]:
    """The version at the alias of each registered model, with these metrics of the run that made it; only reads."""
    from mlflow import MlflowClient

    log_in(uri, "reader")
    client, found = MlflowClient(uri, registry_uri=uri), []
    for model in client.search_registered_models():
        if (number := model.aliases.get(alias)) is not None:
            version = client.get_model_version(model.name, number)
            logged = client.get_run(version.run_id).data.metrics if version.run_id else {}
            named = {name: value for name in metrics if (value := _logged(logged, name)) is not None}
            run, since = version.tags.get("run", ""), version.creation_timestamp / 1000
            found.append(Champion(model.name, str(number), run, since, named))
    return found


def _logged(metrics: Mapping[str, float], name: str) -> float | None:
    """A figure of data/metrics/evaluate.json, under the name that it has in MLflow (journal.evaluation)."""
    names = (name, f"eval/{name}", f"{name}/rate", f"eval/{name}/rate")
    return next((metrics[known] for known in names if known in metrics), None)


def tagged_runs(cluster: Cluster, tag: str) -> set[str]:
    """Names of pipeline runs that carry a tag in MLflow, set to anything but false."""
    with suppress(UserError):
        client = open_client(absolute_uri(cluster.tracking_uri), None)
        every = [found.experiment_id for found in client.search_experiments()]
        found = [run.data.tags for run in client.search_runs(every, f"tags.{tag} LIKE '%'")]
        return {tags["pipeline_run"] for tags in found if "pipeline_run" in tags and tags[tag].lower() != "false"}
    return set()
