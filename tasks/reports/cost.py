"""What a run cost, by stage: seconds, device-seconds, tokens, tokens a second."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.files import read_json
from tasks.params import Cluster, load_cluster
from tasks.paths import CARD, METRICS
from tasks.tracking.journal import read_lines

Row = tuple[str, str, str, str, str, str]


def costs(root: Path, states: Sequence[Mapping[str, Any]], *, logs: Path | None) -> list[Row]:
    """Rows of the report; a stage that did not run cost nothing, and says so."""
    cluster = load_cluster(root)
    counted = {"reference": _pair_tokens(root), "train": _train_tokens(root)}
    rows = []
    for state in states:
        name, seconds = state["stage"], float(state["seconds"])
        if state["state"] != "ran":
            rows.append((name, state["state"], "", "", "", ""))
            continue
        tokens = counted.get(name)
        speed = _measured_speed(logs, name) or (tokens / seconds if tokens and seconds else None)
        devices = f"{seconds * _workers(cluster, name):.1f}"
        rows.append((name, "ran", f"{seconds:.1f}", devices, _count(tokens), _count(speed)))
    return rows


def _workers(cluster: Cluster, stage: str) -> int:
    groups = {"reference": cluster.reference, "train": cluster.actor_train, "evaluate": cluster.evaluate}
    return groups[stage].num_workers if stage in groups else 1


def _pair_tokens(root: Path) -> float | None:
    """The reference model reads every pair once: its prompt once, and both answers."""
    path = root / CARD / "report.json"
    if not path.exists():
        return None
    report = read_json(path)
    return sum(report["pairs"].values()) * sum(part["mean"] for part in report["tokens"].values())


def _train_tokens(root: Path) -> float | None:
    path = root / METRICS / "train.csv"
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return sum(float(row["tokens"]) for row in csv.DictReader(file) if row.get("tokens")) or None


def _measured_speed(logs: Path | None, stage: str) -> float | None:
    """Tokens by the seconds that the stage itself measured, starting up not counted."""
    lines = read_lines(logs / f"{stage}.jsonl")[0] if logs else []
    windows = [v for line in lines if (v := line.get("values", {})).get("tokens_per_second") and "tokens" in v]
    seconds = sum(window["tokens"] / window["tokens_per_second"] for window in windows)
    return sum(window["tokens"] for window in windows) / seconds if seconds else None


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
