"""What a run cost, by stage: seconds, device-seconds, tokens, tokens a second; GPU hours and their price."""

from typing import Any

from tasks.config.cluster import Cluster
from tasks.reports.summary import RunSummary

Row = tuple[str, str, str, str, str, str]


def costs(run: RunSummary) -> list[Row]:
    """Rows of the report; a stage that did not run has only its state."""
    counted, groups = {"reference": _pair_tokens(run), "train": _train_tokens(run)}, _groups(run.cluster)
    rows = []
    for state in run.states:
        name, seconds = state["stage"], float(state["seconds"])
        if state["state"] != "ran":
            rows.append((name, state["state"], "", "", "", ""))
            continue
        tokens = counted.get(name)
        speed = _measured_speed(run, name) or (tokens / seconds if tokens and seconds else None)
        device_seconds = seconds * (groups[name].num_workers if name in groups else 1)
        rows.append((name, "ran", f"{seconds:.1f}", f"{device_seconds:.1f}", _count(tokens), _count(speed)))
    return rows


def gpu_hours(run: RunSummary) -> dict[str, float]:
    """By stage, of every attempt that the run's journals know: a stage holds its group's GPUs while it runs."""
    hours = {stage: _seconds(lines) / 3600 * gpus(run.cluster, stage) for stage, lines in run.journals.items()}
    return {stage: value for stage, value in hours.items() if value}


def gpus(cluster: Cluster, stage: str) -> float:
    """The GPUs that the workers of a stage hold."""
    if stage == "export" and cluster.inference.zero_stage != 3:  # with stage 3 the group shares the model
        return cluster.inference.gpus_per_worker
    group = cluster.inference if stage in ("export", "promote") else _groups(cluster).get(stage)
    return group.gpus_per_worker * group.num_workers if group else 0.0


def _seconds(journal: list[dict[str, Any]]) -> float:
    """From each start to its end; an attempt that was killed ended with its last line."""
    attempts: list[tuple[int, int]] = []
    is_running = False
    for line in journal:
        if line["kind"] == "start":
            attempts.append((line["time"], line["time"]))
            is_running = True
        elif is_running:
            start, end = attempts[-1]
            attempts[-1] = start, max(end, line["time"])  # values of the same training may be from an earlier run
            is_running = line["kind"] != "end"
    return sum(end - start for start, end in attempts) / 1000


def price(cluster: Cluster, hours: float) -> float | None:
    return None if cluster.price_per_gpu_hour is None else hours * cluster.price_per_gpu_hour


def in_words(cluster: Cluster, hours: float) -> str:
    """`1.50 GPU hours, 3.75 EUR`; the price where the site has set one."""
    cost = price(cluster, hours)
    return f"{hours:.2f} GPU hours" + (f", {cost:.2f} {cluster.currency}" if cost is not None else "")


def gpu_costs(run: RunSummary) -> list[tuple[str, ...]]:
    """Rows of the report: a stage, its GPU hours and their price; the last row is the whole run."""
    hours = gpu_hours(run)
    rows = [*hours.items(), ("the run", sum(hours.values()))] if hours else []
    costs = [(name, value, price(run.cluster, value)) for name, value in rows]
    return [(name, f"{value:.2f}", *([] if cost is None else [f"{cost:.2f}"])) for name, value, cost in costs]


def metrics(run: RunSummary) -> dict[str, float]:
    """GPU hours and price of the whole run, for MLflow; none if it held no GPU."""
    hours = sum(gpu_hours(run).values())
    values = {"cost/gpu_hours": hours, f"cost/{run.cluster.currency}": price(run.cluster, hours)}
    return {name: value for name, value in values.items() if hours and value is not None}


def _groups(cluster: Cluster) -> dict[str, Any]:
    """The worker group of each stage that has one."""
    train, inference = cluster.actor_train, cluster.inference
    return {"sample": inference, "sft": train, "reference": cluster.reference, "train": train, "evaluate": inference}


def _pair_tokens(run: RunSummary) -> float | None:
    """The reference model reads every pair once: its prompt once, and both answers."""
    pairs, tokens = (run.data.get(name, {}).values() for name in ("pairs", "tokens"))
    return sum(pairs) * sum(part["mean"] for part in tokens) or None


def _train_tokens(run: RunSummary) -> float | None:
    return sum(row.get("tokens", 0.0) for row in run.curves.values()) or None


def _measured_speed(run: RunSummary, stage: str) -> float | None:
    """Tokens per second of the steps that the stage itself measured, without its start."""
    values = [line["values"] for line in run.steps(stage)]
    steps = [step for step in values if step.get("tokens_per_second") and "tokens" in step]
    seconds = sum(step["tokens"] / step["tokens_per_second"] for step in steps)
    return sum(step["tokens"] for step in steps) / seconds if seconds else None


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
