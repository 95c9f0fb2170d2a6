"""The table of `dpo runs`."""

from datetime import datetime

from services.mlflow_urls import mlflow_link, needs_server
from tasks.runs.dvc_lock import artifacts_size, read_lock
from tasks.runs.records import (
    CRASHED,
    FAILED,
    STOPPED,
    RunRecord,
    all_records,
    damaged_records,
    stage_states,
    text_table,
)
from tasks.system.disk import human
from tasks.system.files import recall


def show() -> None:
    for path in damaged_records():
        print(f"warning: {path} is empty or damaged; its run is not listed. `dpo doctor --fix` moves it aside.")
    records = all_records()
    if not records:
        print("No runs yet. Start one with `make demo`, `dpo run`, or `prefect deployment run dpo/full`.")
        return
    print(text_table(map(_row, records), ("run", "state", "since", "model", "stages", "artifacts", "MLflow")))
    if any(needs_server(recall(record.folder / "run.json")) for record in records):
        print("\nThe pages of MLflow open after `dpo up`.")
    if unfinished := [record.name for record in records if record.current_state in (FAILED, STOPPED, CRASHED)]:
        print(f"\n`dpo resume {unfinished[0]}` continues a run that did not finish; `dpo gc` deletes old ones.")


def _row(record: RunRecord) -> tuple[str, ...]:
    states = stage_states(record)
    ran = [state["stage"] for state in states if state["state"] == "ran" and state["stage"] != "promote"]
    cached = sum(state["state"] != "ran" for state in states)
    run = recall(record.folder / "run.json")
    what = f"{', '.join(ran) or 'none'} ran, {cached} cached" if states else ""
    since = datetime.fromisoformat(record.since).strftime("%Y-%m-%d %H:%M") if record.since else ""
    lock = read_lock(record.results())
    size = human(artifacts_size(lock)) if lock else ""
    model = recall(record.folder / "params.json").get("promote", {}).get("model_name", "")
    return record.name, record.current_state, since, model, what, size, (mlflow_link(run) if run else None) or ""
