"""The artifacts of a run on Prefect's pages: its result as Markdown, its stages as a table, links to MLflow.

Preference text is untrusted and escaped wherever it is rendered.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from flows import embedded_server
from services.mlflow_urls import mlflow_home, mlflow_link
from tasks.artifacts.markup import plain
from tasks.config.cluster import load_cluster
from tasks.config.metrics import headlines, interval
from tasks.config.params import load_params
from tasks.config.paths import ROOT
from tasks.reports import cost, run_report
from tasks.reports.headline import decision_of, verdict
from tasks.runs.records import RESULTS
from tasks.runs.workspace import Workspace
from tasks.secrets.redact import redact
from tasks.system.files import read_json_lines, read_json_or_empty, write_json
from tasks.tracking import journal, pipeline_run
from tasks.tracking.journal import flatten_metrics

REPORT = "report.html"
SAMPLES = 3
MAX_CHARACTERS = 400  # of a sample


def announce(workspace: Workspace) -> bool:
    """Publish links to the running run; whether MLflow's page of the run is among them already."""
    page, report = _mlflow_page(workspace), _mlflow_page(workspace, f"/artifacts/{REPORT}")
    home = page or mlflow_home(read_json_or_empty(workspace.run_folder / "settings.json"))
    when_ended = f"- [the run report]({report}), once the run has ended"
    lines = [
        f"- [curves and params in MLflow]({home})",
        when_ended if report else f"- the run report: `{REPORT}` in MLflow",
        f"- logs, journals and the report on disk: `{workspace.run_folder}`",
    ]
    if workspace.is_worktree:
        lines.append(f"- code, params.yaml and dvc.lock, once the run has ended: branch `runs/{workspace.run_name}`")
    try:
        create_markdown_artifact(redact("\n".join(lines)), key="dpo-links", description="Where to follow this run")
    except Exception as error:  # a page that does not answer must not stop a run
        get_run_logger().debug("Cannot publish the links: %s", error)
    return page is not None


def _mlflow_page(workspace: Workspace, part: str = "") -> str | None:
    """The run's page in MLflow, or a part of it; None before MLflow has given the run an id."""
    return mlflow_link(read_json_or_empty(workspace.run_folder / "run.json"), part)


def publish(workspace: Workspace, states: list[dict[str, Any]]) -> None:
    pipeline_run.wait_for_run(workspace.run_folder)
    page = write_page(workspace, states)
    journal.StageJournal(workspace.run_folder, journal.FLOW).artifact(page)
    create_table_artifact(states, key="dpo-stages", description="Which stages ran, and which were unchanged")
    create_markdown_artifact(redact(result(workspace)), key="dpo-result", description="The result of the run")
    link = _mlflow_page(workspace, f"/artifacts/{REPORT}") or page.as_uri()
    create_link_artifact(link, link_text="The run report", key="dpo-report", description="Curves, answers, lineage")


def write_page(workspace: Workspace, states: list[dict[str, Any]]) -> Path:
    """Write the run report into the run's folder: it has seconds and run ids, so it is no artifact of a stage."""
    target = workspace.run_folder / REPORT
    links = {
        "Prefect": embedded_server.flow_page(runtime.flow_run.id),
        "MLflow": _mlflow_page(workspace),
        "branch": f"runs/{workspace.run_name}" if workspace.is_worktree else None,
    }
    target.write_text(
        run_report.page(workspace.root, workspace.run_name, states, logs=workspace.run_folder, links=links)
    )
    return target


@contextmanager
def recorded(workspace: Workspace, tags: dict[str, str]) -> Iterator[list[dict[str, Any]]]:
    """Record a run in MLflow, however it ends. Yields the list of stage states, which the caller fills."""
    os.environ["DPO_HOME"] = str(ROOT)  # the same for all runs of this process; the run's name is passed on explicitly
    params, cluster = load_params(workspace.root / "params.yaml"), load_cluster(workspace.root)
    folder = pipeline_run.open_run(params, cluster, root=workspace.root, folder=workspace.run_folder)
    sweep_tags = json.loads(os.environ.get("DPO_TAGS", "{}"))
    pipeline_run.begin(folder, {**tags, **sweep_tags, "prefect_flow_run": str(runtime.flow_run.id)})
    states: list[dict[str, Any]] = []
    status = "FAILED"
    try:
        yield states
        status = "FINISHED"
    finally:
        write_json(folder / "stages.json", states)
        if costs := cost.metrics(cluster, folder):
            journal.StageJournal(folder, journal.FLOW).summary(costs)
        by_stage = {state["stage"]: state["state"] for state in states}
        pipeline_run.finish(folder, root=workspace.root, states=by_stage, status=status)


def result(workspace: Workspace) -> str:
    measured = read_json_or_empty(workspace.root / "data" / "metrics" / "evaluate.json")
    metrics = {name: value for name, value in flatten_metrics(measured).items() if value != {}}
    summary = verdict(measured, decision_of(workspace.root))[1]
    first, rest = _numbers(metrics)
    parts = ["# Result", escape(summary, 2000), first, _behaviour(metrics), _samples(workspace.root)]
    parts += ["## Where", _where(workspace), rest]
    return "\n\n".join(part for part in parts if part) + "\n"


def _numbers(metrics: dict[str, Any]) -> tuple[str, str]:
    """Tables of the report's headline metrics and of all others; each metric once, with its interval."""
    elsewhere = ("samples/", "intervals/", "tables/")
    shown = {name: value for name, value in metrics.items() if not name.startswith(elsewhere)}
    headline = {name: label for name, label, _ in headlines(shown)}
    first = [(label, shown[name], _interval(metrics, name)) for name, label in headline.items()]
    rest = [(name, value, _interval(metrics, name)) for name, value in shown.items() if name not in headline]
    more = "## All held-out metrics\n\n" + table(("held-out", "", "95% interval"), rest) if rest else ""
    return table(("held-out", "", "95% interval"), first) if first else "", more


def _interval(metrics: dict[str, Any], name: str) -> str:
    bounds = interval(metrics, name)
    return f"{bounds[0]:.4g} to {bounds[1]:.4g}" if bounds else ""


def _behaviour(metrics: dict[str, Any]) -> str:
    names = [name.removeprefix("samples/policy/") for name in metrics if name.startswith("samples/policy/")]
    rows = [(name, metrics.get(f"samples/base/{name}", ""), metrics[f"samples/policy/{name}"]) for name in names]
    return table(("sampled answers", "before", "after"), rows) if rows else ""


def _samples(root: Path) -> str:
    path = root / "data" / "metrics" / "samples.jsonl"
    if not path.exists():
        return ""
    samples = read_json_lines(path)
    rows = [(sample["prompt"], sample["base"]["text"], sample["policy"]["text"]) for sample in samples]
    rows.sort(key=lambda row: row[1] == row[2])  # changed answers first
    return "## Samples\n\n" + table(("prompt", "before", "after"), rows[:SAMPLES]) if rows else ""


def _where(workspace: Workspace) -> str:
    checkout = f"`{workspace.root / 'data' / 'model'}`"
    worktree = f"`dpo open {workspace.run_name}` checks it out from DVC's cache"  # the worktree is removed
    lines = [f"- the model: {worktree if workspace.is_worktree else checkout}"]
    lines.append("- every run and curve: `dpo up` starts MLflow's pages")
    lines.append(f"- the run report: `{workspace.run_folder / REPORT}`")
    if link := _mlflow_page(workspace):
        lines.append(f"- this run in MLflow: [{link}]({link})")
    if workspace.is_worktree:
        lines.append(f"- its code, params.yaml and dvc.lock: branch `runs/{workspace.run_name}`")
        lines.append(f"- its metrics and samples: `{workspace.run_folder / RESULTS}`")
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers with four digits, text escaped."""
    lines: list[Iterable[str]] = [head, ("---",) * len(head), *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def escape(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Text that Markdown shows as it is, and shortened. Prefect's page does not decode HTML entities."""
    return plain(text if len(text) <= max_characters else text[:max_characters] + " ...")
