"""The MLflow experiment of our runs, and how its page shows them: columns and charts, as one shared view.

The view is a tag of the experiment in the format that MLflow's own "Share" button writes.
"""

import json
from pathlib import Path
from typing import Any

VIEW = "dpo"  # ...&viewStateShareKey=dpo in the address of the runs page
COLUMNS = {  # with its width in pixels
    "metrics.`eval/win_rate/rate`": 130,
    "metrics.`eval/rewards/accuracies`": 165,
    "metrics.`eval/rewards/margins`": 155,
    "metrics.`eval/loss`": 80,
    "metrics.`eval/kl/answers`": 120,
    "metrics.`loss`": 75,
    "params.`train.beta`": 85,
    "params.`train.learning_rate`": 145,
    "params.`source.model`": 110,
    "tags.`recipe`": 80,
    "tags.`git_commit`": 110,
    "attributes.`Duration`": 80,
}
CURVES = (  # the metrics of each line chart
    ("loss", "eval/loss"),
    ("rewards/accuracies", "eval/rewards/accuracies"),
    ("rewards/margins", "eval/rewards/margins"),
    ("kl", "eval/kl"),
    ("logps/chosen", "eval/logps/chosen"),
    ("grad_norm",),
    ("learning_rate",),
    ("pairs_per_second",),
)
BARS = ("eval/win_rate/rate", "eval/rewards/accuracies", "eval/kl/answers", "eval/health/length_ratio")
TRAINING, EVALUATION, DIFFERENCES = "training curves", "evaluation", "what differs"
NOTE = (
    "A row is a run of the pipeline, with its params, its curves and its evaluation; below it are its stages. "
    "The chart icon above the list overlays the curves of all runs shown."
)


def view() -> dict[str, Any]:
    """Columns of the list, and charts: curves first, then bars of the evaluation, then params that differ."""
    lines = [
        _chart(TRAINING, names[0], type="LINE", selectedMetricKeys=names, xAxisKey="step", lineSmoothness=0)
        for names in CURVES
    ]
    bars = [_chart(EVALUATION, name, type="BAR") for name in BARS]
    difference = {"compareGroups": ["Parameters", "Model metrics"], "showDifferencesOnly": True}
    table = _chart(DIFFERENCES, "", type="DIFFERENCE", chartName="Params and metrics that differ", **difference)
    sections = [
        {"uuid": name, "name": name, "display": True, "isReordered": True}
        for name in (TRAINING, EVALUATION, DIFFERENCES)
    ]
    return {
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(COLUMNS),
        "columnWidths": COLUMNS,
        "compareRunCharts": [*lines, *bars, table],
        "compareRunSections": sections,
        "isAccordionReordered": True,  # otherwise sections are sorted by name
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _chart(section: str, metric: str, **more: Any) -> dict[str, Any]:
    name = f"{VIEW}-{metric}-{more['type']}"
    return {"uuid": name, "metricSectionId": section, "metricKey": metric, "deleted": False, **more}


TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # otherwise MLflow opens its pages for agents
    "mlflow.note.content": NOTE,
    f"mlflow.sharedViewState.{VIEW}": json.dumps(view()),
}


def experiment_id(client: Any, name: str, artifacts: Path | None) -> str:
    """The id of the experiment, created at first use. `artifacts` is where a store without a server keeps them."""
    experiment = client.get_experiment_by_name(name) or make_experiment(client, name, artifacts)
    for tag, value in TAGS.items():
        current = experiment.tags.get(tag)
        if current is None or (current != value and "View" in tag):  # an edited note stays
            client.set_experiment_tag(experiment.experiment_id, tag, value)
    return str(experiment.experiment_id)


def make_experiment(client: Any, name: str, artifacts: Path | None) -> Any:
    from mlflow.exceptions import MlflowException

    location = artifacts.resolve().as_uri() if artifacts else None
    try:
        client.create_experiment(name, artifact_location=location)
    except MlflowException:  # another run created it a moment ago
        if client.get_experiment_by_name(name) is None:
            raise
    return client.get_experiment_by_name(name)
