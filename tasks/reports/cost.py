"""What a run cost, by stage: seconds, device-seconds, tokens, tokens a second; GPU hours and their price."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config.params import Cluster, load_cluster
from tasks.config.paths import CARD, METRICS
from tasks.system.files import read_json
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


def gpu_hours(cluster: Cluster, logs: Path) -> dict[str, float]:
    """By stage, of every attempt that the run's journals know: a stage holds its group's GPUs while it runs."""
    found = {path.stem: _seconds(path) / 3600 * gpus(cluster, path.stem) for path in sorted(logs.glob("*.jsonl"))}
    return {stage: hours for stage, hours in found.items() if hours}


def gpus(cluster: Cluster, stage: str) -> float:
    """That the workers of a stage hold."""
    group = _groups(cluster).get(stage, cluster.evaluate)
    if stage not in ("sample", "sft", "reference", "train", "evaluate", "export", "promote"):
        return 0.0
    alone = stage == "export" and cluster.evaluate.zero_stage != 3  # otherwise the group shares the model
    return group.gpus_per_worker * (1 if alone else group.num_workers)


def _seconds(journal: Path) -> float:
    """From each start to its end; an attempt that was killed ended with its last line."""
    total, began, last = 0, None, 0
    for line in read_lines(journal)[0]:
        if line["kind"] == "start":
            total, began = total + (last - began if began is not None else 0), line["time"]
        elif line["kind"] == "end" and began is not None:
            total, began = total + line["time"] - began, None
        last = line["time"]
    return (total + (last - began if began is not None else 0)) / 1000


def price(cluster: Cluster, hours: float) -> float | None:
    return None if cluster.price_per_gpu_hour is None else hours * cluster.price_per_gpu_hour


def in_words(cluster: Cluster, hours: float) -> str:
    """`1.50 GPU hours, 3.75 EUR`; the price where the site has set one."""
    cost = price(cluster, hours)
    return f"{hours:.2f} GPU hours" + (f", {cost:.2f} {cluster.currency}" if cost is not None else "")


def gpu_costs(cluster: Cluster, logs: Path) -> list[tuple[str, ...]]:
    """Rows of the report: a stage, its GPU hours and their price; the last row is the whole run."""
    hours = gpu_hours(cluster, logs)
    rows = [*hours.items(), ("the run", sum(hours.values()))] if hours else []
    costs = [(name, value, price(cluster, value)) for name, value in rows]
    return [(name, f"{value:.2f}", *([] if cost is None else [f"{cost:.2f}"])) for name, value, cost in costs]


def figures(cluster: Cluster, logs: Path) -> dict[str, float]:
    """Of the whole run, for MLflow; none where it held no GPU."""
    hours = sum(gpu_hours(cluster, logs).values())
    cost = price(cluster, hours)
    return (
        {} if not hours else {"cost/gpu_hours": hours, **({} if cost is None else {f"cost/{cluster.currency}": cost})}
    )


def _workers(cluster: Cluster, stage: str) -> int:
    groups = _groups(cluster)
    return groups[stage].num_workers if stage in groups else 1


def _groups(cluster: Cluster) -> dict[str, Any]:
    train = cluster.actor_train
    evaluate = cluster.evaluate
    return {"sample": evaluate, "sft": train, "reference": cluster.reference, "train": train, "evaluate": evaluate}


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
