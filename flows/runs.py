"""Runs by name: what each was asked, where it works, how it stands. `python -m flows.runs` (or `make runs`) lists them.

A run's folder, <logging_dir>/<name>, holds its record, journals, logs and report, and, once its worktree is gone, its
small results: all that pages and tables show.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flows import ROOT
from tasks.errors import UserError
from tasks.files import read_json, recall, write_json
from tasks.machines.lock import holder
from tasks.machines.process import is_alive, this_process
from tasks.output import as_command

WORKTREES = ROOT / ".scratch" / "worktrees"
RESULTS = "results"
SMALL = (  # what reports, comparisons and drift checks read
    "params.yaml",
    "infra/cluster.yaml",
    "infra/recipe.yaml",
    "infra/overrides.yaml",
    "dvc.lock",
    "data/metrics",
    "data/raw/manifest.json",
    "data/base/manifest.json",
    "data/card/report.json",
    "data/model/manifest.json",
    "data/model/README.md",
)
RUNNING, FINISHED, FAILED, STOPPED, CRASHED = "running", "finished", "failed", "stopped", "crashed"


@dataclass(frozen=True)
class Record:
    name: str
    root: str  # the worktree, or the checkout
    state: str = RUNNING
    since: str = ""
    until: str = ""
    pid: int = 0
    process: dict[str, Any] = field(default_factory=dict)  # its start time and boot id: an id is used again
    flow_runs: list[str] = field(default_factory=list)  # Prefect's ids: more than one where it was resumed
    commit: str = ""  # that the worktree is made from
    files: dict[str, Any] = field(default_factory=dict)  # what the worktree's configuration files hold instead
    made: bool = False  # whether the worktree is whole

    @property
    def own(self) -> bool:
        return Path(self.root) != ROOT

    @property
    def folder(self) -> Path:
        return runs_folder() / self.name

    @property
    def now(self) -> str:
        """A record says `running` until it is told otherwise; a killed run tells nobody."""
        if self.state != RUNNING:
            return self.state
        found = holder(Path(self.root))
        starting = self.own and not self.made and is_alive({"pid": self.pid, **self.process})
        return RUNNING if starting or (found and found.get("pid") == self.pid) else CRASHED

    def write(self, **changes: Any) -> "Record":
        new = replace(self, **changes)
        write_json(new.folder / "record.json", asdict(new))
        return new

    def results(self) -> Path:
        """Where its small results are: in its folder once it is finished, in its workspace before."""
        kept = self.folder / RESULTS
        return kept if kept.exists() else Path(self.root)


def runs_folder() -> Path:
    from tasks.params import load_cluster

    return ROOT / load_cluster(ROOT).logging_dir


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def find(name: str) -> Record | None:
    path = runs_folder() / name / "record.json"
    found = _read(path)
    if found is None and path.exists():
        raise UserError(f"The record of the run {name} is damaged ({path}). `make doctor FIX=1` sets it aside.")
    return found


def _read(path: Path) -> Record | None:
    """None where there is no record, or one that cannot be read."""
    try:
        return Record(**recall(path))
    except TypeError:
        return None


def known(name: str) -> Record:
    """By our name, by the name that Prefect gave the flow run, or by the flow run's id."""
    if (found := find(name) or _find_by_flow_run(name)) is None:
        names = ", ".join(record.name for record in records()[:10]) or "none yet"
        raise UserError(f"There is no run named '{name}'. Runs: {names}. `make runs` lists them all.")
    return found


def _find_by_flow_run(name: str) -> Record | None:
    """Of two with one name, the newer."""
    for record in records():
        if any(name == run or record.name == label(name, run) for run in record.flow_runs):
            return record
    return None


def label(name: str, flow_run: str) -> str:
    """Of a run that nobody named: Prefect's name for it with the beginning of its id, since Prefect repeats names."""
    suffix = f"-{flow_run[:8]}"
    return name if name.endswith(suffix) else f"{name}{suffix}"


def records() -> list[Record]:
    """Newest first."""
    found = [record for path in runs_folder().glob("*/record.json") if (record := _read(path))]
    return sorted(found, key=lambda record: record.since, reverse=True)


def damaged() -> list[Path]:
    """Records that cannot be read: one of them is no reason to show none."""
    return [path for path in sorted(runs_folder().glob("*/record.json")) if _read(path) is None]


def begin(record: Record, flow_run: str) -> Record:
    """At work from now on, for the first time or again."""
    flow_runs = [*record.flow_runs, *([flow_run] if flow_run not in record.flow_runs else [])]
    return record.write(
        state=RUNNING,
        since=record.since or now(),
        until="",
        pid=os.getpid(),
        process=this_process(),
        flow_runs=flow_runs,
    )


def keep_results(record: Record) -> None:
    """Copy what is small out of a workspace that is about to go."""
    aside = record.folder / f".{RESULTS}"
    shutil.rmtree(aside, ignore_errors=True)
    for name in SMALL:
        path = Path(record.root) / name
        target = aside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, copy_function=shutil.copyfile)
        elif path.exists():
            shutil.copyfile(path, target)
    shutil.rmtree(record.folder / RESULTS, ignore_errors=True)
    aside.rename(record.folder / RESULTS)


def check_resumable(name: str) -> Record:
    """The record of a run that can go on; a sentence where it cannot."""
    record = known(name)
    name = record.name
    if record.now == FINISHED:
        raise UserError(f"The run {name} is finished; there is nothing to resume. `make open RUN={name}` shows it.")
    if record.now == RUNNING:
        raise UserError(
            f"The run {name} is at work, in process {record.pid}, since {record.since}. Wait until it ends, or stop it "
            "in Prefect or with Ctrl-C, and then resume it."
        )
    return record


def stages(record: Record) -> list[dict[str, Any]]:
    try:
        return list(read_json(record.folder / "stages.json"))
    except (FileNotFoundError, ValueError):
        return []


def _row(record: Record) -> tuple[str, ...]:
    from flows.links import mlflow_link

    done = stages(record)
    ran = [state["stage"] for state in done if state["state"] == "ran" and state["stage"] != "promote"]
    other = sum(state["state"] != "ran" for state in done)
    known = recall(record.folder / "run.json")
    link = mlflow_link(known) if known else None
    what = f"{', '.join(ran) or 'none'} ran, {other} cached" if done else ""
    since = datetime.fromisoformat(record.since).strftime("%Y-%m-%d %H:%M") if record.since else ""
    return record.name, record.now, since, what, link or ""


def table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


@as_command
def main() -> None:
    found = records()
    for path in damaged():
        print(f"warning: {path} is empty or damaged, and its run is not shown. `make doctor FIX=1` sets it aside.")
    if not found:
        print("There is no run yet: `make demo`, `make run`, or `prefect deployment run dpo/full`.")
        return
    print(table(map(_row, found), ("run", "state", "since", "stages", "MLflow")))
    unfinished = [record.name for record in found if record.now in (FAILED, STOPPED, CRASHED)]
    if unfinished:
        print(
            f"\n`make resume RUN={unfinished[0]}` goes on with one that did not finish; `make gc` clears away old ones."
        )


if __name__ == "__main__":
    main()
