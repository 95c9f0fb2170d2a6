"""The result of the last run on the terminal: metrics before and after, three answers side by side, and paths.

The flow runs `python -m tasks.reports.terminal`.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.config.cluster import load_cluster
from tasks.config.metrics import ACCURACY, accuracy_label
from tasks.config.paths import METRICS, MODEL, main_checkout
from tasks.errors import UserError
from tasks.reports.cost import gpu_hours, in_words
from tasks.reports.headline import decision_of, describe_decision, share
from tasks.runs import commits
from tasks.system.files import read_json, read_json_lines
from tasks.tracking.journal import flatten_metrics

SAMPLES = 3
LABELS = {"kind": "answers kindly", "correct": "answers correctly", "finished": "ends by itself", "words": "words"}


def main() -> None:
    if not (METRICS / "evaluate.json").exists():
        sys.exit("error: there is no result yet (data/metrics/evaluate.json). Run `make demo`, or `dvc repro`.")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    metrics = read_json(METRICS / "evaluate.json")
    console.print()
    console.print(_metrics_table(metrics))
    if samples := read_json_lines(METRICS / "samples.jsonl"):
        console.print(_samples_table(samples))
    _print_locations(console)


def _metrics_table(metrics: dict[str, Any]) -> Table:
    table = Table(title="What the model learned", title_justify="left", title_style="bold")
    table.add_column("on held-out data")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold")
    samples = metrics.get("samples", {"base": {}, "policy": {}})
    for name in (name for name in LABELS if name in samples["base"]):
        before, after = samples["base"][name], samples["policy"][name]
        table.add_row(f"{LABELS[name]} (sampled)", _value(name, before), _value(name, after))
    values = flatten_metrics(metrics)
    if "win_rate/rate" in values:
        table.add_row("win rate vs. base model", "-", share(values, "win_rate/rate"))
    table.add_row(f"{accuracy_label(values)}, {values['pairs']:.0f} pairs", "-", share(values, ACCURACY))
    if "rewards/margins" in values:  # unpaired rows may have one label alone
        table.add_row("reward margin", "0", f"{values['rewards/margins']:.2f}")
    return table


def _value(name: str, value: float) -> str:
    return f"{value:.1f}" if name == "words" else f"{value:.1%}"


def _samples_table(samples: list[dict[str, Any]]) -> Table:
    """Prompts whose two answers got different verdicts come first: they show the change."""
    table = Table(title="Sampled answers", title_justify="left", title_style="bold", show_lines=True)
    for column in ("prompt", "before", "after"):
        table.add_column(column, ratio=1)

    def verdicts(answer: dict[str, Any]) -> list[Any]:
        return [value for value in answer.values() if isinstance(value, bool)]

    different_first = sorted(samples, key=lambda sample: verdicts(sample["base"]) == verdicts(sample["policy"]))
    for sample in different_first[:SAMPLES]:
        texts = (sample["prompt"], sample["base"]["text"], sample["policy"]["text"])
        table.add_row(*(Text(_short(text)) for text in texts))  # Text: no markup from data
    return table


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."


def _print_locations(console: Console) -> None:
    lines = {
        "model": _model(),
        "registry": describe_decision(decision_of(Path())),
        "chat": _chat_command(),
        "metrics": _metrics_commands(),
        "cost": _cost(),
        "report": _report(),
        "pages": "dpo up (MLflow and Prefect: runs, curves, models)",
    }
    for name, text in lines.items():
        if text:
            console.print(f"{name:<10} {text}", soft_wrap=True, markup=False)


def _model() -> str:
    content = "merged safetensors, adapter, model card, manifest"
    if any(MODEL.glob("*.safetensors")):
        return f"{MODEL} ({content})"
    run = os.environ.get("DPO_RUN", "name")  # its worktree is gone; its branch and DVC's cache hold the model
    return f"run `dpo open {run}` to get the files ({content}); branch runs/{run}"


def _chat_command() -> str:
    """How to talk to this model; empty where neither this folder nor the registry has it."""
    if any(MODEL.glob("*.safetensors")):
        return "dpo chat"
    decision = decision_of(Path())
    return f"dpo chat {decision['model']}/{decision['version']}" if decision else ""


def _metrics_commands() -> str:
    """Commands of DVC that work in the checkout: a run in a worktree left its metrics in its commit alone."""
    run, finished = os.environ.get("DPO_RUN", ""), []
    with suppress(UserError):  # no git
        finished = [name for name in commits.finished_runs() if name != run]
    if run and finished:
        return f"dvc metrics diff runs/{finished[0]} runs/{run}; the same with `plots`"
    if any(MODEL.glob("*.safetensors")):
        return "dvc metrics show, dvc plots show"
    return f"dvc metrics diff runs/{run} runs/OTHER compares it with another run"


def _cost() -> str:
    """GPU hours of the current flow run; empty if it held no GPU."""
    cluster, name = load_cluster(), os.environ.get("DPO_RUN")
    hours = sum(gpu_hours(cluster, main_checkout() / cluster.logging_dir / name).values()) if name else 0.0
    return in_words(cluster, hours) if hours else ""


def _report() -> Path | None:
    """The page of the current flow run, or of the last `dpo report`."""
    runs = main_checkout() / load_cluster().logging_dir
    candidates = [runs / os.environ.get("DPO_RUN", "") / "report.html", Path(".scratch/report.html")]
    return next((path for path in candidates if path.exists()), None)


if __name__ == "__main__":
    main()
