"""The result of the last run on the terminal: what changed, three answers side by side, and where things are.

python -m tasks.reports.terminal
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.files import home, read_json
from tasks.params import load_cluster
from tasks.paths import METRICS, MODEL
from tasks.reports.cost import gpu_hours, in_words
from tasks.reports.verdict import decided, decision_of

SHOWN = 3
WHAT = {"kind": "answers kindly", "correct": "answers correctly", "finished": "ends by itself", "words": "words"}


def main() -> None:
    if not (METRICS / "evaluate.json").exists():
        sys.exit("error: there is no result yet (data/metrics/evaluate.json). Run `make demo`, or `dvc repro`.")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    metrics = read_json(METRICS / "evaluate.json")
    console.print()
    console.print(_changes(metrics))
    samples = [json.loads(line) for line in (METRICS / "samples.jsonl").read_text().splitlines()]
    if samples:
        console.print(_side_by_side(samples))
    _where(console)


def _changes(metrics: dict[str, Any]) -> Table:
    table = Table(title="What the model learnt", title_justify="left", title_style="bold")
    table.add_column("on held-out data")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold")
    samples = metrics.get("samples", {"base": {}, "policy": {}})
    for name in (name for name in WHAT if name in samples["base"]):
        before, after = samples["base"][name], samples["policy"][name]
        table.add_row(f"{WHAT[name]} (sampled)", _value(name, before), _value(name, after))
    if "rate" in (won := metrics.get("win_rate", {})):
        table.add_row(f"wins against the answer before{_interval(won)}", "-", f"{won['rate']:.1%}")
    bounds = metrics.get("intervals", {}).get("rewards/accuracies")
    table.add_row(f"prefers the chosen answer{_interval(bounds)}", "-", f"{metrics['rewards/accuracies']:.1%}")
    table.add_row("reward margin", "0", f"{metrics['rewards/margins']:.2f}")
    return table


def _interval(bounds: dict[str, float] | None) -> str:
    return f" ({bounds['low']:.1%} to {bounds['high']:.1%})" if bounds else ""


def _value(name: str, value: float) -> str:
    return f"{value:.1f}" if name == "words" else f"{value:.1%}"


def _side_by_side(samples: list[dict[str, Any]]) -> Table:
    """Prompts whose two answers the judge tells apart come first: there is something to see."""
    table = Table(title="Sampled answers", title_justify="left", title_style="bold", show_lines=True)
    for column in ("prompt", "before", "after"):
        table.add_column(column, ratio=1)

    def verdicts(answer: dict[str, Any]) -> list[Any]:
        return [value for value in answer.values() if isinstance(value, bool)]

    told_apart = sorted(samples, key=lambda sample: verdicts(sample["base"]) == verdicts(sample["policy"]))
    for sample in told_apart[:SHOWN]:
        texts = (sample["prompt"], sample["base"]["text"], sample["policy"]["text"])
        table.add_row(*(Text(_short(text)) for text in texts))  # Text: markup in data is data
    return table


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."


def _where(console: Console) -> None:
    console.print(f"model      {_model()}", soft_wrap=True, markup=False)
    console.print(f"registry   {decided(decision_of(Path()))}", soft_wrap=True, markup=False)
    console.print("metrics    dvc metrics show, dvc plots show")
    if cost := _cost():
        console.print(f"cost       {cost}")
    if (page := _page()) is not None:
        console.print(f"report     {page}", soft_wrap=True)
    console.print("pages      make up (MLflow and Prefect: runs, curves, models)")


def _model() -> str:
    what = "merged safetensors, adapter, model card, manifest"
    if any(MODEL.glob("*.safetensors")):
        return f"{MODEL} ({what})"
    run = os.environ.get("DPO_RUN", "name")  # its worktree is gone, and this is what was kept of it
    return f"`make open RUN={run}` lays it out ({what}); branch runs/{run}"


def _cost() -> str:
    """Of the flow's run that we belong to; nothing where it held no GPU."""
    cluster, name = load_cluster(), os.environ.get("DPO_RUN")
    hours = sum(gpu_hours(cluster, home() / cluster.logging_dir / name).values()) if name else 0.0
    return in_words(cluster, hours) if hours else ""


def _page() -> Path | None:
    """Of the flow's run that we belong to, or of the last one by hand."""
    runs = home() / load_cluster().logging_dir
    candidates = [runs / os.environ.get("DPO_RUN", "") / "report.html", Path(".scratch/report.html")]
    return next((path for path in candidates if path.exists()), None)


if __name__ == "__main__":
    main()
