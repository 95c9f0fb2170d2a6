"""The result of the last run on the terminal: metrics before and after, three answers side by side, and paths.

The flow runs `python -m tasks.reports.terminal`.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.artifacts.evaluation import accuracy_label, is_unpaired
from tasks.config.metrics import ACCURACY
from tasks.config.paths import METRICS, MODEL
from tasks.errors import UserError
from tasks.reports.cost import gpu_hours, in_words
from tasks.reports.headline import describe_decision, share
from tasks.reports.summary import RunSummary
from tasks.runs import commits

SAMPLES = 3
LABELS = {"kind": "answers kindly", "correct": "answers correctly", "finished": "ends by itself", "words": "words"}


def main() -> None:
    if not (METRICS / "evaluate.json").exists():
        sys.exit("error: there is no result yet (data/metrics/evaluate.json). Run `make demo`, or `dvc repro`.")
    run = RunSummary.here()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print()
    console.print(_metrics_table(run))
    if run.samples:
        console.print(_samples_table(run.examples[:SAMPLES]))
    _print_locations(console, run)


def _metrics_table(run: RunSummary) -> Table:
    table = Table(title="What the model learned", title_justify="left", title_style="bold")
    table.add_column("on held-out data")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold")
    values = run.values
    for name, label in LABELS.items():
        if f"samples/base/{name}" in values:
            before, after = (_value(name, values[f"samples/{model}/{name}"]) for model in ("base", "policy"))
            table.add_row(f"{label} (sampled)", before, after)
    if "win_rate/rate" in values:
        table.add_row("win rate vs. base model", "-", share(values, "win_rate/rate"))
    rows = "rows" if is_unpaired(values) else "pairs"
    table.add_row(f"{accuracy_label(values)}, {values['pairs']:.0f} {rows}", "-", share(values, ACCURACY))
    if "rewards/margins" in values:  # unpaired rows may have one label alone
        table.add_row("reward margin", "0", f"{values['rewards/margins']:.2f}")
    return table


def _value(name: str, value: float) -> str:
    return f"{value:.1f}" if name == "words" else f"{value:.1%}"


def _samples_table(samples: list[dict[str, Any]]) -> Table:
    table = Table(title="Sampled answers", title_justify="left", title_style="bold", show_lines=True)
    for column in ("prompt", "before", "after"):
        table.add_column(column, ratio=1)
    for sample in samples:
        texts = (sample["prompt"], sample["base"]["text"], sample["policy"]["text"])
        table.add_row(*(Text(_short(text)) for text in texts))  # Text: no markup from data
    return table


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."


def _print_locations(console: Console, run: RunSummary) -> None:
    lines = {
        "model": _model(run),
        "registry": describe_decision(run.decision),
        "chat": _chat_command(run),
        "metrics": _metrics_commands(run),
        "cost": _cost(run),
        "report": _report(run),
        "pages": "dpo up (MLflow and Prefect: runs, curves, models)",
    }
    for name, text in lines.items():
        if text:
            console.print(f"{name:<10} {text}", soft_wrap=True, markup=False)


def _has_weights(run: RunSummary) -> bool:
    """False of a run in a worktree, which is gone: its branch and DVC's cache hold the model."""
    return any((run.root / MODEL).glob("*.safetensors"))


def _model(run: RunSummary) -> str:
    content = "merged safetensors, adapter, model card, manifest"
    if _has_weights(run):
        return f"{MODEL} ({content})"
    return f"run `dpo open {run.name}` to get the files ({content}); branch runs/{run.name}"


def _chat_command(run: RunSummary) -> str:
    """How to talk to this model; empty where neither this folder nor the registry has it."""
    if _has_weights(run):
        return "dpo chat"
    return f"dpo chat {run.decision['model']}/{run.decision['version']}" if run.decision else ""


def _metrics_commands(run: RunSummary) -> str:
    """Commands of DVC that work in the checkout: a run in a worktree left its metrics in its commit alone."""
    finished = []
    with suppress(UserError):  # no git
        finished = [name for name in commits.finished_runs() if name != run.name]
    if run.folder and finished:
        return f"dvc metrics diff runs/{finished[0]} runs/{run.name}; the same with `plots`"
    if _has_weights(run):
        return "dvc metrics show, dvc plots show"
    return f"dvc metrics diff runs/{run.name} runs/OTHER compares it with another run"


def _cost(run: RunSummary) -> str:
    """GPU hours of the current flow run; empty if it held no GPU."""
    hours = sum(gpu_hours(run).values())
    return in_words(run.cluster, hours) if hours else ""


def _report(run: RunSummary) -> Path | None:
    """The page of the current flow run, or of the last `dpo report`."""
    candidates = [*([run.folder / "report.html"] if run.folder else []), Path(".scratch/report.html")]
    return next((path for path in candidates if path.exists()), None)


if __name__ == "__main__":
    main()
