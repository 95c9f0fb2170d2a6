"""MLflow's experiment that our runs stand in, and how its page shows them: pages of model training, useful columns."""

import json
from pathlib import Path
from typing import Any

VIEW = "dpo"  # ...&viewStateShareKey=dpo in the address of the runs' page
COLUMNS = (
    "attributes.`Duration`",
    "metrics.`eval/rewards/accuracies`",
    "metrics.`eval/win_rate/rate`",
    "metrics.`eval/loss`",
    "metrics.`eval/kl/answers`",
    "metrics.`loss`",
    "params.`train.beta`",
    "params.`train.learning_rate`",
    "params.`source.model`",
    "tags.`recipe`",
    "tags.`git_commit`",
    "attributes.`Dataset`",
)
NOTE = (
    "A row is a run of the pipeline, with its params, its last training values and its evaluation; below it are its "
    "stages, whose curves by step are in `train of ...`. To compare runs tick them and press Compare."
)
TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # otherwise MLflow opens its pages for agents
    "mlflow.note.content": NOTE,
    f"mlflow.sharedViewState.{VIEW}": json.dumps({"selectedColumns": COLUMNS, "columnOrder": COLUMNS}),
}


def experiment(client: Any, name: str, artifacts: Path | None) -> str:
    """Its id; made where there is none. `artifacts` is where a store without a server keeps them."""
    found = client.get_experiment_by_name(name) or _make(client, name, artifacts)
    for tag, value in TAGS.items():
        if found.tags.get(tag) is None or (found.tags[tag] != value and "View" in tag):  # a person's note stays
            client.set_experiment_tag(found.experiment_id, tag, value)
    return str(found.experiment_id)


def _make(client: Any, name: str, artifacts: Path | None) -> Any:
    from mlflow.exceptions import MlflowException

    location = artifacts.resolve().as_uri() if artifacts else None
    try:
        client.create_experiment(name, artifact_location=location)
    except MlflowException:  # another run made it a moment ago
        if client.get_experiment_by_name(name) is None:
            raise
    return client.get_experiment_by_name(name)
