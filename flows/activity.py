"""What stages at work have logged so far, from the journals of their runs; flows/metrics.py shows it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flows.runs import RUNNING, Record
from tasks.files import recall
from tasks.machines.process import is_alive
from tasks.tracking.journal import FLOW, read_lines, sent


@dataclass
class Stage:
    """One stage of one run."""

    run: str
    name: str
    process: dict[str, object] = field(default_factory=dict)  # empty once it has ended
    since: float = 0.0  # seconds since the epoch, as all times here
    logged: float = 0.0
    done: int = 0
    total: int = 0
    unit: str = ""
    values: dict[str, float] = field(default_factory=dict)  # the last ones by name
    offset: int = 0  # read so far, bytes


class Journals:
    """Reads on where the last look ended: a scrape of a long run costs no more than that of a short one."""

    def __init__(self) -> None:
        self.known: dict[Path, Stage] = {}

    def working(self, runs: Path) -> list[Stage]:
        """The stages at work now."""
        found: dict[Path, Stage] = {}
        working: list[Stage] = []
        for folder in sorted(path.parent for path in runs.glob("*/settings.json")):
            if (works := _works(folder)) is False:
                continue
            for journal in sorted(folder.glob("*.jsonl")):
                found[journal] = stage = _read_on(journal, self.known.get(journal))
                if stage.process and stage.name != FLOW and (works or is_alive(stage.process)):
                    working.append(stage)
        self.known = found
        return working


def _works(folder: Path) -> bool | None:
    """As the record of a flow's run says, whose lock is seen from another container too; None for a run by hand."""
    if not (folder / "record.json").exists():
        return None
    try:
        return Record(**recall(folder / "record.json")).now == RUNNING
    except TypeError:  # damaged
        return False


def _read_on(journal: Path, known: Stage | None) -> Stage:
    if known is None or journal.stat().st_size < known.offset:
        known = Stage(journal.parent.name, journal.stem)
    lines, known.offset = read_lines(journal, known.offset)
    for line in lines:
        at = line["time"] / 1000
        match line["kind"]:
            case "start":
                known.process, known.since, known.logged = line, at, at
                known.done, known.total, known.unit, known.values = 0, 0, "", {}
            case "end":
                known.process = {}
            case "progress":
                known.done, known.total, known.unit, known.logged = line["done"], line["total"], line["unit"], at
            case "metrics":
                known.values |= line["values"]
                if "loss" in line["values"]:  # a step of training: more recent than its progress
                    known.done, known.logged = line["step"], at
    return known


def unsent_lines(runs: Path) -> int:
    """Lines of all journals that MLflow has not got yet."""
    return sum(len(read_lines(journal, sent(journal.parent, journal.stem))[0]) for journal in _journals(runs))


def _journals(runs: Path) -> Iterator[Path]:
    """With something to send."""
    for journal in runs.glob("*/*.jsonl"):
        if journal.stat().st_size > sent(journal.parent, journal.stem):
            yield journal
