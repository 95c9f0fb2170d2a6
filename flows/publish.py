"""What Prefect's pages show of a run: its result as Markdown, its stages as a table, links to MLflow.

Preference text comes from others and is escaped wherever it is rendered.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from flows import ROOT, server
from flows.links import mlflow_home, mlflow_link
from flows.runs import RESULTS
from flows.workspace import Workspace
from tasks.files import recall, write_json
from tasks.redact import redact
from tasks.reports.markup import plain

REPORT = "report.html"
SAMPLES = 3
LONGEST = 400  # characters of a sample


def announce(place: Workspace) -> bool:
    """Where to follow the run, as an artifact from its start; whether MLflow's page of the run is among the links."""
    ids = recall(place.logs / "run.json")
    report = mlflow_link(ids, f"/artifacts/{REPORT}")
    tracking = str(recall(place.logs / "settings.json").get("tracking_uri", ""))
    home = mlflow_link(ids) or mlflow_home({"tracking_uri": tracking})
    lines = [
        f"- [curves and params in MLflow]({home})",
        f"- [the run report]({report}), once the run has ended"
        if report
        else f"- the run report: `{REPORT}` in MLflow",
        f"- logs, journals and the report on disk: `{place.logs}`",
    ]
    if place.own:
        lines.append(f"- code, params.yaml and dvc.lock, once the run has ended: branch `runs/{place.key}`")
    try:
        create_markdown_artifact(redact("\n".join(lines)), key="dpo-links", description="Where to follow this run")
    except Exception as error:  # a page that does not answer is no reason to stop a run
        get_run_logger().debug("The links are not shown: %s", error)
    return bool(ids)


def publish(place: Workspace, states: list[dict[str, Any]]) -> None:
    from tasks.tracking import journal

    journal.wait_for_run(place.logs)
    page = write_page(place, states)
    journal.Run(place.logs, journal.FLOW).artifact(page)
    create_table_artifact(states, key="dpo-stages", description="What ran, and what was unchanged")
    create_markdown_artifact(redact(result(place)), key="dpo-result", description="What the run achieved")
    where = mlflow_link(recall(place.logs / "run.json"), f"/artifacts/{REPORT}") or page.as_uri()
    create_link_artifact(where, link_text="The run report", key="dpo-report", description="Curves, answers, lineage")


def write_page(place: Workspace, states: list[dict[str, Any]]) -> Path:
    """The run's own page, in its log folder: seconds and run ids are no artefacts of a stage."""
    from tasks.reports.page import page

    target = place.logs / REPORT
    links = {
        "Prefect": server.flow_page(runtime.flow_run.id),
        "MLflow": mlflow_link(recall(place.logs / "run.json")),
        "branch": f"runs/{place.key}" if place.own else None,
    }
    target.write_text(page(place.root, place.key, states, logs=place.logs, links=links))
    return target


@contextmanager
def recorded(place: Workspace, tags: dict[str, str]) -> Iterator[list[dict[str, Any]]]:
    """Yields the list of what became of each stage, and tells MLflow when the run is over, however it ended."""
    from tasks.params import load_cluster, load_params
    from tasks.reports import cost
    from tasks.tracking import journal

    os.environ["DPO_HOME"] = str(ROOT)  # the same for all runs of this process; which run it is, is handed on
    params, cluster = load_params(place.root / "params.yaml"), load_cluster(place.root)
    folder = journal.open_run(params, cluster, root=place.root, folder=place.logs)
    more = json.loads(os.environ.get("DPO_TAGS", "{}"))  # which sweep, say
    journal.begin(folder, {**tags, **more, "prefect_flow_run": str(runtime.flow_run.id)})
    states: list[dict[str, Any]] = []
    status = "FAILED"
    try:
        yield states
        status = "FINISHED"
    finally:
        write_json(folder / "stages.json", states)
        if figures := cost.figures(cluster, folder):
            journal.Run(folder, journal.FLOW).summary(figures)
        by_stage = {state["stage"]: state["state"] for state in states}
        journal.finish(folder, root=place.root, states=by_stage, status=status)


def result(place: Workspace) -> str:
    from tasks.reports.verdict import decision_of, verdict

    measured = recall(place.root / "data" / "metrics" / "evaluate.json")
    metrics, said = flatten(measured), escape(verdict(measured, decision_of(place.root))[1], longest=2000)
    first, rest = _numbers(metrics)
    parts = ["# Result", said, first, _behaviour(metrics), _samples(place.root), "## Where", _where(place), rest]
    return "\n\n".join(part for part in parts if part) + "\n"


def flatten(content: dict[str, Any], above: str = "") -> dict[str, Any]:
    """{"samples": {"base": {"kind": 1}}} as {"samples/base/kind": 1}."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        flat.update(flatten(value, f"{above}{name}/") if isinstance(value, dict) else {f"{above}{name}": value})
    return flat


def _numbers(metrics: dict[str, Any]) -> tuple[str, str]:
    """The report page's headline figures, and a table of all others; each figure once, its interval beside it."""
    aside = ("samples/", "intervals/", "tables/")
    shown = {name: value for name, value in metrics.items() if not name.startswith(aside)}
    headline = {f"{name}/rate" if f"{name}/rate" in shown else name: what for name, what in _headline().items()}
    first = [(what, shown[name], _interval(metrics, name)) for name, what in headline.items() if name in shown]
    rest = [(name, value, _interval(metrics, name)) for name, value in shown.items() if name not in headline]
    more = "## All held-out metrics\n\n" + _table(("held-out", "", "95% interval"), rest) if rest else ""
    return _table(("held-out", "", "95% interval"), first) if first else "", more


def _headline() -> dict[str, str]:
    from tasks.reports.page import CARDS

    return {name: what for name, what, _ in CARDS}


def _interval(metrics: dict[str, Any], name: str) -> str:
    own = name.removesuffix("/rate")  # a rate stands beside its own bounds
    low, high = (metrics.get(f"intervals/{name}/{end}", metrics.get(f"{own}/{end}")) for end in ("low", "high"))
    return "" if low is None or high is None else f"{low:.4g} to {high:.4g}"


def _behaviour(metrics: dict[str, Any]) -> str:
    names = [name.removeprefix("samples/policy/") for name in metrics if name.startswith("samples/policy/")]
    rows = [(name, metrics.get(f"samples/base/{name}", ""), metrics[f"samples/policy/{name}"]) for name in names]
    return _table(("sampled answers", "before", "after"), rows) if rows else ""


def _samples(root: Path) -> str:
    path = root / "data" / "metrics" / "samples.jsonl"
    if not path.exists():
        return ""
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [(sample["prompt"], sample["base"]["text"], sample["policy"]["text"]) for sample in samples]
    rows.sort(key=lambda row: row[1] == row[2])  # where something changed there is something to see
    return "## Samples\n\n" + _table(("prompt", "before", "after"), rows[:SAMPLES]) if rows else ""


def _where(place: Workspace) -> str:
    lines = [f"- the model: {_model(place)}", "- every run and curve: `make up` opens MLflow's pages"]
    lines.append(f"- the run report: `{place.logs / REPORT}`")
    if link := mlflow_link(recall(place.logs / "run.json")):
        lines.append(f"- this run in MLflow: [{link}]({link})")
    if place.own:
        lines.append(f"- its code, params.yaml and dvc.lock: branch `runs/{place.key}`")
        lines.append(f"- its metrics and samples: `{place.logs / RESULTS}`")
    return "\n".join(lines)


def _model(place: Workspace) -> str:
    """The worktree is gone when this is read."""
    here = f"`{place.root / 'data' / 'model'}`"
    return f"`make open RUN={place.key}` lays it out, from DVC's cache" if place.own else here


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def escape(text: str, longest: int = LONGEST) -> str:
    """Text as a table cell that shows it and does nothing else. Prefect's page shows entities as they are written."""
    return plain(text if len(text) <= longest else text[:longest] + " ...")
