"""The record of each run: its name, workspace, configuration and state. `dpo runs` lists them.

A run's folder, <logging_dir>/<name>, holds its record, journals, logs and report. Once its worktree is removed, it also
holds its small results: all that pages and tables show.
"""

import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tasks.config.cluster import load_cluster
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.system.files import publish, read_json, read_json_or_empty, write_json
from tasks.system.lock import workspace_holder
from tasks.system.processes import is_alive, this_process

WORKTREES = ROOT / ".scratch" / "worktrees"
RESULTS = "results"
SMALL_RESULTS = (  # what reports, comparisons and drift checks read
    "params.yaml",
    "infra/cluster.yaml",
    "infra/recipe.yaml",
    "infra/overrides.yaml",
    "dvc.lock",
    "data/metrics",
    "data/raw/manifest.json",
    "data/base/manifest.json",
    "data/sample/manifest.json",
    "data/sft/manifest.json",
    "data/card/report.json",
    "data/model/manifest.json",
    "data/model/README.md",
)
RUNNING, FINISHED, FAILED, STOPPED, CRASHED = "running", "finished", "failed", "stopped", "crashed"


@dataclass(frozen=True)
class RunRecord:
    name: str
    root: str  # the worktree, or the checkout
    state: str = RUNNING
    since: str = ""
    until: str = ""
    pid: int = 0
    process: dict[str, Any] = field(default_factory=dict)  # with start time and boot id: process ids are reused
    flow_runs: list[str] = field(default_factory=list)  # Prefect's ids: several if the run was resumed
    commit: str = ""  # from which the worktree is made
    files: dict[str, Any] = field(default_factory=dict)  # configuration files that differ from the commit's
    started_with: dict[str, Any] = field(default_factory=dict)  # for the next retraining (flows/retrain.py)
    worktree_ready: bool = False

    @property
    def has_worktree(self) -> bool:
        return Path(self.root) != ROOT

    @property
    def folder(self) -> Path:
        return runs_folder() / self.name

    @property
    def current_state(self) -> str:
        """A killed run leaves the state `running`; then it is CRASHED."""
        if self.state != RUNNING:
            return self.state
        lock_holder = workspace_holder(Path(self.root))
        starting = self.has_worktree and not self.worktree_ready and is_alive(self.process)
        return RUNNING if starting or (lock_holder and lock_holder.get("pid") == self.pid) else CRASHED

    def write(self, **changes: Any) -> "RunRecord":
        new = replace(self, **changes)
        write_json(new.folder / "record.json", asdict(new))
        return new

    def results(self) -> Path:
        """The folder of its small results: in its run folder once it is finished, in its workspace before."""
        kept = self.folder / RESULTS
        return kept if kept.exists() else Path(self.root)


def runs_folder() -> Path:
    return ROOT / load_cluster(ROOT).logging_dir


def timestamp() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def read_record(name: str) -> RunRecord | None:
    """The record of the run with exactly this name."""
    path = runs_folder() / name / "record.json"
    record = _read(path)
    if record is None and path.exists():
        raise UserError(f"The record of the run {name} is damaged ({path}). `dpo doctor --fix` moves it aside.")
    return record


def _read(path: Path) -> RunRecord | None:
    """None if there is no record, or one that cannot be read. Other versions may have other fields."""
    content = read_json_or_empty(path)
    try:
        return RunRecord(**{item.name: content[item.name] for item in fields(RunRecord) if item.name in content})
    except TypeError:
        return None


def find_run(name: str) -> RunRecord:
    """By our name, by the name that Prefect gave the flow run, or by the flow run's id: the newest run."""
    if record := read_record(name):
        return record
    records = all_records()
    for record in records:
        if any(name == run or record.name == default_name(name, run) for run in record.flow_runs):
            return record
    names = ", ".join(record.name for record in records[:10]) or "none yet"
    raise UserError(f"There is no run named '{name}'. Runs: {names}. `dpo runs` lists all runs.")


def default_name(prefect_name: str, flow_run: str) -> str:
    """The name of a run without `--name`: Prefect's name and the start of its id, because Prefect repeats names."""
    suffix = f"-{flow_run[:8]}"
    return prefect_name if prefect_name.endswith(suffix) else f"{prefect_name}{suffix}"


def all_records() -> list[RunRecord]:
    """Every readable record, newest first."""
    readable = [record for path in runs_folder().glob("*/record.json") if (record := _read(path))]
    return sorted(readable, key=lambda record: record.since, reverse=True)


def damaged_records() -> list[Path]:
    return [path for path in sorted(runs_folder().glob("*/record.json")) if _read(path) is None]


def mark_running(record: RunRecord, flow_run: str) -> RunRecord:
    """Record that this process works on the run from now on, for the first time or again."""
    process, flow_runs = this_process(), list(dict.fromkeys([*record.flow_runs, flow_run]))
    since = record.since or timestamp()
    return record.write(state=RUNNING, since=since, until="", pid=process["pid"], process=process, flow_runs=flow_runs)


def keep_results(record: RunRecord) -> None:
    """Copy the small results into the run's folder: the worktree is about to be removed."""
    with publish(record.folder / RESULTS) as results:
        for name in SMALL_RESULTS:
            source, target = Path(record.root) / name, results / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, copy_function=shutil.copyfile)
            elif source.exists():
                shutil.copyfile(source, target)


def check_resumable(name: str) -> RunRecord:
    """The record of a run that can be resumed."""
    record = find_run(name)
    name, state = record.name, record.current_state
    if state == FINISHED:
        raise UserError(f"The run {name} is finished; there is nothing to resume. `dpo open {name}` checks it out.")
    if state == RUNNING:
        raise UserError(
            f"The run {name} is running in process {record.pid} since {record.since}. Wait until it ends, or stop it "
            "in Prefect or with Ctrl-C, and then resume it."
        )
    return record


def stage_states(record: RunRecord) -> list[dict[str, Any]]:
    """What became of each stage of a run, so far."""
    try:
        return list(read_json(record.folder / "stages.json"))
    except (FileNotFoundError, ValueError):
        return []


def text_table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...]) -> str:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
