"""What a sweep came to, where people look: a table and a figure in Prefect, the same in MLflow, a few lines below."""

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import create_image_artifact, create_link_artifact, create_markdown_artifact

from flows import ROOT
from flows.links import compare_link, mlflow_link
from flows.publish import escape
from flows.workspace import Workspace
from tasks.files import write_json
from tasks.reports import sweeps
from tasks.tracking import journal

Result = Mapping[str, Any]


def publish(result: Result, folder: Path) -> None:
    files = sweeps.write(result["rows"], result["metric"], folder)
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
    """A run of the sweep's own in MLflow, with the table and the figure."""
    from tasks.params import load_cluster, load_params

    os.environ["DPO_HOME"] = str(ROOT)
    cluster, place = load_cluster(ROOT), Workspace(ROOT, result["sweep"])
    folder = journal.open_run(load_params(ROOT / "params.yaml"), cluster, root=ROOT, folder=place.logs)
    run = journal.Run(folder, journal.FLOW)
    run.tags({"sweep": result["sweep"], "kind": "sweep", "best": result["best"]})
    best = result["rows"][0]["metric"]
    run.summary({result["metric"]: best} if best is not None else {})
    for file in files:
        run.artifact(file)
    run.write("end", status="FINISHED")
    run.write("close")
    journal.wait_until_sent(run, journal.start_forwarder(folder))


def markdown(result: Result) -> str:
    varied = list(dict.fromkeys(key for row in result["rows"] for key in row["values"]))
    head = ["run", *varied, result["metric"], "95% interval", "seconds", ""]
    rows = [head, ["---"] * len(head), *(_cells(row, varied) for row in result["rows"])]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    failed = [f"- {escape(row['name'])} failed: {escape(row['why'])}" for row in result["rows"] if row["why"]]
    return "\n\n".join([f"# {result['sweep']}", table, *failed, *(f"- {line}" for line in lines(result))]) + "\n"


def _cells(row: Mapping[str, Any], varied: list[str]) -> list[str]:
    page = f"[Prefect]({row['page']})" if row["page"] else ""
    return [*map(escape, sweeps.cells(dict(row), varied)), page]


def lines(result: Result) -> list[str]:
    """What to do next."""
    best = result["rows"][0]
    chance = sweeps.not_told_apart(result["rows"])
    found = [f"best       {best['name']}, {result['metric']} {best['metric']:.4g}"]
    if chance:
        found.append(f"beware     its interval overlaps that of {len(chance)} more, so their order may be chance")
    found.append(f"look       make open RUN={best['name']}; make compare RUN={best['name']}")
    if best["logs"] and (ids := next((one for one in result["ids"] if one["run_id"] == _run_id(best)), None)):
        found.append(f"open       {mlflow_link(ids)} (make up)")
    if link := compare_link(result["ids"]):
        found.append(f"compare    {link}")
    found.append(f"promote    {result['promote']}")
    for row in result["rows"]:
        if row["why"]:
            found.append(f"failed     {row['name']}: {row['why']}")
    if result["failed"]:
        found.append("again      the same command runs what failed, and nothing else")
    return found


def _run_id(row: Mapping[str, Any]) -> str | None:
    from tasks.files import read_json

    file = Path(row["logs"]) / "run.json"
    return read_json(file)["run_id"] if file.exists() else None
