"""The result of the last run on the terminal: what changed, three answers side by side, and where things are.

python -m tasks.report
"""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.files import read_json
from tasks.paths import METRICS, MODEL

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
    table.add_row("prefers the chosen answer (reward accuracy)", "-", f"{metrics['rewards/accuracies']:.1%}")
    table.add_row("reward margin", "0", f"{metrics['rewards/margins']:.2f}")
    return table


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
    console.print(f"model      {MODEL} (merged safetensors, adapter, model card, manifest)")
    if (METRICS / "promote.json").exists():
        decision = read_json(METRICS / "promote.json")
        verdict = (
            f"is {decision['alias']}" if decision["promoted"] else f"not promoted: {'; '.join(decision['reasons'])}"
        )
        console.print(f"registry   {decision['model']} {verdict}", soft_wrap=True)
    console.print("metrics    dvc metrics show, dvc plots show")
    console.print("pages      make ui (MLflow: runs, curves, models)")


if __name__ == "__main__":
    main()
