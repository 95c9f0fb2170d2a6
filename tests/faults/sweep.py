"""`python -m tests.faults.sweep [SCENARIO ...]` (or `make test-faults`): every fault at every durable operation.

Takes hours; `--minutes 40` ends earlier. One operation stands for its like (`points`), `--all` tries each by itself.
The order visits each kind of operation on each file before it repeats one, and leaps over the whole command, so that a
short sweep has seen all kinds and all parts.
What was tried is kept in `--folder`, and the same command goes on from there: delete the folder after a change of code.
Ends with the table as Markdown and JSON, and exit code 1 where anything did not survive.
"""

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.faults.harness import FAULTS, PROJECT, harness
from tests.faults.scenarios import SCENARIOS, Bench

NUMBERS = re.compile(r"[0-9a-f]{8,}|\d+|tmp\w+|(?<=uploading\.)\w+")
SPACE = ("open", "write", "mkdir", "link", "truncate")
# Many operations of a library of others that leave one state, or undo themselves at the next start.
TOGETHER = re.compile(r"/mlflow\.db(-journal)?$|/\.dvc/tmp/rwlock")


Point = tuple[str, int]  # which operations, and the how manieth of them


def points(trace: list[str], all_of_them: bool = False) -> dict[str, list[Point]]:
    """Operations for each fault, those of a kind that was not visited yet first.

    One stands for those that a fault meets in the same state: operations of a process that follow each other and write
    one file, delete one folder, or belong to one phase of an SQLite transaction. A death loses nothing that was
    written, so it needs no fsync; a full disk meets what takes space.
    """
    groups: list[tuple[str, list[Point]]] = []
    latest: dict[str, tuple[str, list[Point]]] = {}
    counted: dict[str, int] = defaultdict(int)
    for line in trace:
        _, process, what, path = line.split(" ", 3)
        only = f"{what} {NUMBERS.sub('*', path)}"
        counted[only] += 1
        kind = only
        if what == "unlink":
            kind = "/".join(only.split("/")[:4])
        elif together := TOGETHER.search(path):
            kind = together[0]
        if all_of_them or process not in latest or latest[process][0] != kind:
            latest[process] = (kind, [])
            groups.append(latest[process])
        latest[process][1].append((only, counted[only]))
    found: dict[str, list[Point]] = {}
    for fault in FAULTS:
        seen: dict[str, int] = defaultdict(int)
        order = []
        for number, (kind, members) in enumerate(groups):
            fit = [point for point in members if _concerns(fault, point[0].split(" ")[0])]
            if fit:
                order.append((seen[kind], _leap(number), fit[len(fit) // 2]))
                seen[kind] += 1
        found[fault] = [point for _, _, point in sorted(order)]
    return found


def _leap(number: int) -> int:
    """The binary digits of a number from behind: 0, 1, 2, 3 become far apart."""
    return int(f"{number:016b}"[::-1], 2)


def _concerns(fault: str, what: str) -> bool:
    calls = what in ("send", "receive")
    return {"kill": what != "fsync", "enospc": what in SPACE, "eio": not calls, "drop": calls}[fault]


def sweep(bench: Bench, names: list[str], results: Path, minutes: float, all_of_them: bool) -> dict[str, Any]:
    """Takes turns between scenarios, so that a limit on time leaves none out."""
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    until = time.monotonic() + 60 * minutes
    todo: dict[str, list[tuple[str, Point]]] = {}
    for name in names:
        expected = bench.expected(name)
        entry = known.setdefault(name, {"tried": {}, "skipped": 0})
        chosen = points(expected["trace"], all_of_them)
        entry |= {"operations": expected["operations"], "points": sum(len(some) for some in chosen.values())}
        turns = zip_longest(*chosen.values())
        every = [(fault, point) for turn in turns for fault, point in zip(FAULTS, turn, strict=True) if point]
        todo[name] = [(fault, point) for fault, point in every if _text(fault, point) not in entry["tried"]]
    spent = dict.fromkeys(names, 0.0)
    while any(todo.values()) and time.monotonic() < until:
        name = min((name for name in names if todo[name]), key=lambda name: spent[name])
        fault, (only, at) = todo[name].pop(0)
        began = time.monotonic()
        wrong = bench.try_fault(name, fault, at, only)
        spent[name] += time.monotonic() - began
        if wrong is None:
            known[name]["skipped"] += 1  # the number of operations varies a little
        else:
            known[name]["tried"][_text(fault, (only, at))] = wrong
        results.write_text(json.dumps(known, indent=1))
        tried, survived = len(known[name]["tried"]), sum(not one for one in known[name]["tried"].values())
        print(f"{name}: {_text(fault, (only, at))}: {wrong or 'survived'} ({survived} of {tried})", flush=True)
    return known


def _text(fault: str, point: Point) -> str:
    return f"{fault} at {point[0]}, no. {point[1]}"


def table(known: dict[str, Any]) -> str:
    lines = ["| command | operations | points | " + " | ".join(f"{fault}: tried, survived" for fault in FAULTS) + " |"]
    lines.append("|---" * (3 + len(FAULTS)) + "|")
    total = {fault: [0, 0] for fault in FAULTS}
    for name, entry in known.items():
        cells = []
        for fault in FAULTS:
            outcomes = [wrong for point, wrong in entry["tried"].items() if point.split()[0] == fault]
            survived = sum(not wrong for wrong in outcomes)
            total[fault][0] += len(outcomes)
            total[fault][1] += survived
            cells.append(f"{len(outcomes)}, {survived}" if outcomes else "-")
        lines.append(f"| `{name}` | {entry['operations']} | {entry['points']} | {' | '.join(cells)} |")
    sums = [sum(entry[what] for entry in known.values()) for what in ("operations", "points")]
    lines.append(
        f"| all | {sums[0]} | {sums[1]} | {' | '.join(f'{tried}, {good}' for tried, good in total.values())} |"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=[], help=f"of {', '.join(SCENARIOS)}; all without one")
    parser.add_argument("--minutes", type=float, default=24 * 60)
    parser.add_argument("--all", action="store_true", help="every operation by itself")
    parser.add_argument("--folder", type=Path, default=PROJECT / ".scratch" / "faults")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    with harness(folder) as made, closing(Bench(folder, made, *_seeds(folder / "seeds"))) as bench:
        names = [name for name in SCENARIOS if name in asked.scenarios or not asked.scenarios]
        known = sweep(bench, names, folder / "results.json", asked.minutes, asked.all)
    (folder / "table.md").write_text(table(known) + "\n")
    print(table(known))
    failed = [(name, point) for name, entry in known.items() for point, wrong in entry["tried"].items() if wrong]
    for name, point in failed:
        print(f"{name}, {point}: {'; '.join(known[name]['tried'][point])}")
    print(f"{folder / 'table.md'}, {folder / 'results.json'}")
    sys.exit(1 if failed else 0)


def _seeds(folder: Path) -> tuple[Path, Path]:
    """A base model, barely trained, and an empty MLflow database."""
    if not (folder / "made").exists():
        from mlflow import MlflowClient

        from tasks.artifacts import demo
        from training.models import tiny

        tiny.make(folder / "base", demo.conversations(0)[:300], seed=0, steps=20)
        (folder / "store").mkdir(exist_ok=True)
        MlflowClient(f"sqlite:///{folder / 'store'}/mlflow.db").search_experiments()
        (folder / "made").touch()
    return folder / "base", folder / "store"


if __name__ == "__main__":
    main()
