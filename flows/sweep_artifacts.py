"""The result of a sweep: a table and a figure in Prefect and MLflow, and the next steps as text."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import create_image_artifact, create_link_artifact, create_markdown_artifact

from flows.artifacts import escape, table
from services.mlflow_urls import compare_link, mlflow_link
from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.config.paths import ROOT
from tasks.reports import sweep_table
from tasks.runs.records import runs_folder
from tasks.system.files import read_json_or_empty, write_json
from tasks.tracking import journal, pipeline_run

Result = Mapping[str, Any]


def publish(result: Result, folder: Path) -> None:
    files = sweep_table.write(result["rows"], result["metric"], folder)
    write_json(folder / "result.json", result)
    page = folder / "sweep.md"
    page.write_text(markdown(result))
    _track(result, [*files, page])
    create_markdown_artifact(page.read_text(), key="sweep-result", description="The runs, best first")
    picture = base64.b64encode((folder / "sweep.png").read_bytes()).decode()
    create_image_artifact(f"data:image/png;base64,{picture}", key="sweep-figure", description="Parallel coordinates")
    if link := compare_link(result["ids"]):
        create_link_artifact(link, link_text="Compare in MLflow", key="sweep-compare", description="All finished runs")


def _track(result: Result, files: list[Path]) -> None:
    """Give the sweep its own run in MLflow, with the table and the figure."""
    params, cluster = load_params(ROOT / "params.yaml"), load_cluster(ROOT)
    folder = pipeline_run.open_run(params, cluster, root=ROOT, folder=runs_folder() / result["sweep"])
    run = journal.StageJournal(folder, journal.FLOW)
    run.tags({"sweep": result["sweep"], "kind": "sweep", "best": result["best"]})
    best = result["rows"][0]["metric"]
    run.summary({result["metric"]: best} if best is not None else {})
    for file in files:
        run.artifact(file)
    run.write("end", status="FINISHED")
    run.write("close")
    pipeline_run.wait_until_sent(run, pipeline_run.start_uploader(folder))


def markdown(result: Result) -> str:
    rows = result["rows"]
    varied = sweep_table.varied(rows)
    # The links are ours and not escaped: a column of their own, added to the finished table.
    cells = [sweep_table.cells(row, varied) for row in rows]
    lines = table(["run", *varied, result["metric"], "95% interval", "seconds"], cells).splitlines()
    pages = ["", "---", *(f"[Prefect]({row['page']})" if row["page"] else "" for row in rows)]
    lines = [f"{line} {page} |" for line, page in zip(lines, pages, strict=True)]
    failed = [f"- {escape(row['name'])} failed: {escape(row['why'])}" for row in rows if row["why"]]
    steps = [f"- {line}" for line in next_steps(result)]
    return "\n\n".join([f"# {result['sweep']}", "\n".join(lines), *failed, *steps]) + "\n"


def next_steps(result: Result) -> list[str]:
    best = result["rows"][0]
    steps = [f"best       {best['name']}, {result['metric']} {best['metric']:.4g}"]
    if overlapping := sweep_table.not_told_apart(result["rows"]):
        steps.append(f"beware     its interval overlaps that of {len(overlapping)} more runs: the order may be chance")
    steps.append(f"look       dpo open {best['name']}; dpo compare {best['name']}")
    if best["logs"] and (ids := read_json_or_empty(Path(best["logs"]) / "run.json")):
        steps.append(f"open       {mlflow_link(ids)} (dpo up)")
    if link := compare_link(result["ids"]):
        steps.append(f"compare    {link}")
    steps.append(f"promote    {result['promote']}")
    steps += [f"failed     {row['name']}: {row['why']}" for row in result["rows"] if row["why"]]
    if result["failed"]:
        steps.append("again      the same command runs what failed, and nothing else")
    return steps
