"""The stages that are running now and what they logged last, read from the journals of their runs."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tasks.runs.records import RUNNING, RunRecord
from tasks.system.files import read_json_or_empty
from tasks.system.processes import is_alive
from tasks.tracking.journal import FLOW
from tasks.tracking.journal_reader import START, Position, read_journal, read_run, sent


@dataclass
class Stage:
    """One stage of one run. Times are seconds since the epoch."""

    run: str
    name: str
    process: dict[str, object] = field(default_factory=dict)  # empty once the stage has ended
    since: float = 0.0
    logged: float = 0.0
    done: int = 0
    total: int = 0
    unit: str = ""
    values: dict[str, float] = field(default_factory=dict)  # last value by metric name
    position: Position = START  # of its journal, read so far


class Journals:
    """Reads only lines that are new since the last scrape, so that a long run costs no more than a short one."""

    def __init__(self) -> None:
        self.known: dict[Path, Stage] = {}

    def active_stages(self, runs: Path) -> list[Stage]:
        known: dict[Path, Stage] = {}
        active: list[Stage] = []
        for folder in sorted(path.parent for path in runs.glob("*/settings.json")):
            if (is_active := _is_active(folder)) is False:
                continue
            for journal in sorted(folder.glob("*.jsonl")):
                known[journal] = stage = _read_new_lines(journal, self.known.get(journal))
                if stage.process and stage.name != FLOW and (is_active or is_alive(stage.process)):
                    active.append(stage)
        self.known = known
        return active


def _is_active(folder: Path) -> bool | None:
    """From the record of a flow run, whose lock other containers see too; None for stages run by `dvc repro`."""
    if not (folder / "record.json").exists():
        return None
    try:
        return RunRecord(**read_json_or_empty(folder / "record.json")).current_state == RUNNING
    except TypeError:  # damaged
        return False


def _read_new_lines(journal: Path, stage: Stage | None) -> Stage:
    if stage is None or journal.stat().st_size < stage.position.offset:
        stage = Stage(journal.parent.name, journal.stem)
    lines, stage.position = read_journal(journal, stage.position)
    for line in lines:
        time = line["time"] / 1000
        match line["kind"]:
            case "start":
                stage.process, stage.since, stage.logged = line, time, time
                stage.done, stage.total, stage.unit, stage.values = 0, 0, "", {}
            case "end":
                stage.process = {}
            case "progress":
                stage.done, stage.total, stage.unit, stage.logged = line["done"], line["total"], line["unit"], time
            case "metrics":
                stage.values |= line["values"]
                if "loss" in line["values"]:  # a training step: more recent than the last progress line
                    stage.done, stage.logged = line["step"], max(stage.logged, time)
    return stage


def unsent_lines(runs: Path) -> int:
    """Journal lines that MLflow has not received yet."""
    runs_read = (read_run(folder, partial(sent, folder)) for folder in runs.glob("*/"))
    return sum(len(lines) for stages in runs_read for lines, _ in stages.values())
