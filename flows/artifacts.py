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
from tasks.artifacts.evaluation import Interval, interval
from tasks.artifacts.markup import plain
from tasks.config.params import load_params
from tasks.reports import cost, run_report
from tasks.reports.summary import RunSummary
from tasks.runs.records import RESULTS
from tasks.runs.workspace import Workspace
from tasks.secrets.redact import redact
from tasks.system.files import read_json_or_empty, write_json
from tasks.tracking import journal, pipeline_run

REPORT = "report.html"
SAMPLES = 3
MAX_CHARACTERS = 400  # of a sample
HELD_OUT = ("held-out", "", "95% interval")


def announce(workspace: Workspace) -> bool:
    """Publish links to the running run; whether MLflow's page of the run is among them already."""
    ids = summary(workspace).ids
    page, report = mlflow_link(ids), mlflow_link(ids, f"/artifacts/{REPORT}")
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


def summary(workspace: Workspace, states: Sequence[dict[str, Any]] = ()) -> RunSummary:
    return RunSummary(workspace.run_name, workspace.root, workspace.run_folder, states)


def publish(workspace: Workspace, states: list[dict[str, Any]]) -> None:
    pipeline_run.wait_for_run(workspace.run_folder)
    run = summary(workspace, states)
    page = write_page(workspace, run)
    flow = journal.StageJournal(workspace.run_folder, journal.FLOW)
    flow.artifact(page)
    flow.tags({"mlflow.note.content": description(run)})  # MLflow shows it as the run's description
    create_table_artifact(states, key="dpo-stages", description="Which stages ran, and which were unchanged")
    create_markdown_artifact(redact(result(workspace, run)), key="dpo-result", description="The result of the run")
    link = mlflow_link(run.ids, f"/artifacts/{REPORT}") or page.as_uri()
    create_link_artifact(link, link_text="The run report", key="dpo-report", description="Curves, answers, lineage")


def write_page(workspace: Workspace, run: RunSummary) -> Path:
    """Write the run report into the run's folder: it has seconds and run ids, so it is no artifact of a stage."""
    target = workspace.run_folder / REPORT
    links = {
        "Prefect": embedded_server.flow_page(runtime.flow_run.id),
        "MLflow": mlflow_link(run.ids),
        "branch": f"runs/{workspace.run_name}" if workspace.is_worktree else None,
    }
    target.write_text(run_report.page(run, links))
    return target


@contextmanager
def recorded(workspace: Workspace, tags: dict[str, str]) -> Iterator[list[dict[str, Any]]]:
    """Record a run in MLflow, however it ends. Yields the list of stage states, which the caller fills."""
    states: list[dict[str, Any]] = []
    params, run = load_params(workspace.root / "params.yaml"), summary(workspace, states)
    folder = pipeline_run.open_run(params, run.cluster, root=workspace.root, folder=workspace.run_folder)
    sweep_tags = json.loads(os.environ.get("DPO_TAGS", "{}"))
    pipeline_run.begin(folder, {**tags, **sweep_tags, "prefect_flow_run": str(runtime.flow_run.id)})
    status = "FAILED"
    try:
        yield states
        status = "FINISHED"
    finally:
        write_json(folder / "stages.json", states)
        if costs := cost.metrics(run):
            journal.StageJournal(folder, journal.FLOW).summary(costs)
        by_stage = {state["stage"]: state["state"] for state in states}
        pipeline_run.finish(folder, root=workspace.root, states=by_stage, status=status)


def result(workspace: Workspace, run: RunSummary) -> str:
    parts = [f"# Result\n\n{description(run)}", _behaviour(run), _samples(run), "## Where", _where(workspace, run)]
    return "\n\n".join([*filter(None, [*parts, _other_metrics(run)])]) + "\n"


def description(run: RunSummary) -> str:
    """The verdict, and the headline metrics with their intervals."""
    rows = [(metric.label, metric.value, _bounds(metric.interval)) for metric in run.headlines]
    return "\n\n".join([escape(run.verdict, 2000), *([table(HELD_OUT, rows)] if rows else [])])


def _other_metrics(run: RunSummary) -> str:
    """Each metric once: without the headline metrics, and what has tables of its own."""
    shown, elsewhere = {metric.name for metric in run.headlines}, ("samples/", "intervals/", "tables/")
    names = [name for name in run.values if name not in shown and not name.startswith(elsewhere)]
    rows = [(name, run.values[name], _bounds(interval(run.values, name))) for name in names]
    return f"## All held-out metrics\n\n{table(HELD_OUT, rows)}" if rows else ""


def _bounds(bounds: Interval | None) -> str:
    return f"{bounds[0]:.4g} to {bounds[1]:.4g}" if bounds else ""


def _behaviour(run: RunSummary) -> str:
    names = [name.removeprefix("samples/policy/") for name in run.values if name.startswith("samples/policy/")]
    rows = [(name, *(run.values.get(f"samples/{model}/{name}", "") for model in ("base", "policy"))) for name in names]
    return table(("sampled answers", "before", "after"), rows) if rows else ""


def _samples(run: RunSummary) -> str:
    samples = run.examples[:SAMPLES]
    rows = [(sample["prompt"], sample["base"]["text"], sample["policy"]["text"]) for sample in samples]
    return "## Samples\n\n" + table(("prompt", "before", "after"), rows) if rows else ""


def _where(workspace: Workspace, run: RunSummary) -> str:
    checkout = f"`{workspace.root / 'data' / 'model'}`"
    worktree = f"`dpo open {workspace.run_name}` checks it out from DVC's cache"  # the worktree is removed
    lines = [f"- the model: {worktree if workspace.is_worktree else checkout}"]
    lines.append("- every run and curve: `dpo up` starts MLflow's pages")
    lines.append(f"- the run report: `{workspace.run_folder / REPORT}`")
    if link := mlflow_link(run.ids):
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
