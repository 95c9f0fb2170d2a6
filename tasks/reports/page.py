"""The run report: one page that needs nothing but itself. Text from data is escaped wherever it stands.

`python -m tasks.reports.page` writes .scratch/report.html from what the workspace holds; the flow writes one a run.
"""

import csv
import html
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tasks.files import read_json
from tasks.params import load_cluster
from tasks.paths import CARD, METRICS, MODEL
from tasks.redact import redact
from tasks.release.gate import by_slash
from tasks.reports import svg
from tasks.reports.cost import costs, gpu_costs
from tasks.reports.markup import charts, escape, section, table, text
from tasks.reports.style import STYLE
from tasks.reports.verdict import decision_of, verdict
from tasks.tracking.journal import curves, read_lines

SHOWN = 8  # samples, and disagreements
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a page that could load or run nothing
OUTCOMES = {1.0: '<b class="win">won</b>', 0.0: '<b class="loss">lost</b>', 0.5: "tied"}
CARDS = (
    ("win_rate", "wins against the base model", True),
    ("win_rate/length_controlled", "the same, at equal length", True),
    ("rewards/accuracies", "prefers the chosen answer", True),
    ("rewards/margins", "reward margin", False),
    ("kl/answers", "KL to the base, nats per answer", False),
    ("calibration/expected_error", "calibration error", False),
    ("health/repetition", "repetition", False),
    ("health/length_ratio", "length against the base", False),
)
CURVES = (
    ("loss", ("loss", "eval/loss")),
    ("reward accuracy", ("rewards/accuracies", "eval/rewards/accuracies")),
    ("rewards", ("rewards/chosen", "rewards/rejected")),
    ("reward margin", ("rewards/margins", "eval/rewards/margins")),
    ("KL to the reference", ("kl", "eval/kl")),
    ("log-probabilities", ("logps/chosen", "logps/rejected")),
    ("gradient norm", ("grad_norm",)),
    ("learning rate", ("learning_rate",)),
)
SPEED = "pairs_per_second"  # of the run's journal: a speed is no part of a result, and train.csv is one


def page(
    root: Path,
    title: str,
    states: Sequence[Mapping[str, Any]] = (),
    *,
    logs: Path | None = None,
    links: Mapping[str, str | None] = MappingProxyType({}),
) -> str:
    """`links` are addresses of this run elsewhere, by what they lead to."""
    metrics, decision = _json(root / METRICS / "evaluate.json"), decision_of(root)
    good, sentence = verdict(metrics, decision)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _links(links),
        f'<p class="verdict{"" if good else " no"}">{escape(sentence)}</p>',
        _numbers(metrics),
        section("Against the champion", _comparison(decision)),
        section("Training", charts([*_curves(root), _speed(logs)])),
        section("Held-out pairs", charts(_held_out(root)) + _tables(metrics)),
        section("Answers, before and after", _samples(_lines(root / METRICS / "samples.jsonl"))),
        section("Pairs it most disagrees with", _disagreements(_lines(root / METRICS / "pairs.jsonl"))),
        section("Data", _data(_json(root / CARD / "report.json"))),
        section("Lineage", _lineage(_json(root / MODEL / "manifest.json"), decision)),
        section(
            "Cost",
            table(("stage", "", "seconds", "device-seconds", "tokens", "tokens/s"), costs(root, states, logs=logs))
            + _gpu_costs(root, logs),
        ),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    guard = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    return redact(
        f'<!doctype html><html lang="en"><head>{head}{guard}<title>{escape(title)}</title><style>{STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _gpu_costs(root: Path, logs: Path | None) -> str:
    cluster = load_cluster(root)
    head = ["stage", "GPU hours", *([cluster.currency] if cluster.price_per_gpu_hour else [])]
    return table(head, gpu_costs(cluster, logs)) if logs else ""


def _numbers(metrics: dict[str, Any]) -> str:
    values, cards = by_slash(metrics), []
    for name, what, share in CARDS:
        value = values.get(f"{name}/rate", values.get(name))
        if value is None:
            continue
        low, high = (values.get(f"{name}/{end}", values.get(f"intervals/{name}/{end}")) for end in ("low", "high"))
        shown = f"{value:.1%}" if share else f"{value:.3g}"
        inside = f'<span class="soft">{escape(what)}</span><b>{shown}</b>{_range(low, high, share)}'
        cards.append(f'<div class="number">{inside}</div>')
    return f'<div class="numbers">{"".join(cards)}</div>' if cards else ""


def _range(low: float | None, high: float | None, share: bool) -> str:
    if low is None or high is None:
        return ""
    if not share:
        return f'<span class="tag">{low:.3g} to {high:.3g}</span>'
    bar = f'<div class="range"><i style="left:{low:.1%};right:{max(0.0, 1 - high):.1%}"></i></div>'
    return f'<span class="tag">{low:.1%} to {high:.1%}</span>{bar}'


def _comparison(decision: dict[str, Any]) -> str:
    """On today's held-out set and, where the champion was evaluated on another, on that one too."""
    before, earlier = f"version {decision.get('champion_before')}", decision.get("earlier") or {}
    parts = [_compared("on the same prompts", decision.get("comparison", {}), before)]
    if earlier.get("comparison"):
        parts.append(_compared(f"on {before}'s own held-out pairs", earlier["comparison"], before))
    return "".join(parts)


def _compared(where: str, comparison: dict[str, Any], before: str) -> str:
    rows = [
        (
            name,
            f"{row['ours']:.4g}",
            f"{row['theirs']:.4g}",
            f"{row['difference']:+.4f}",
            f"{row['low']:+.4f} to {row['high']:+.4f}",
        )
        for name, row in comparison.items()
    ]
    return table((where, "this", before, "difference", "95% interval"), rows)


def _links(links: Mapping[str, str | None]) -> str:
    """An address of a page is a link, anything else (the name of a branch) is text."""
    shown = [
        f'<a href="{escape(where)}" rel="noopener noreferrer">{escape(name)}</a>'
        if where.startswith(("http://", "https://"))
        else f"{escape(name)} <code>{escape(where)}</code>"
        for name, where in links.items()
        if where
    ]
    return f'<p class="links">{" ".join(shown)}</p>' if shown else ""


def _curves(root: Path) -> list[str]:
    steps = curves(root)
    return [
        svg.lines(title, {n: [(step, row[n]) for step, row in steps.items() if n in row] for n in names})
        for title, names in CURVES
    ]


def _speed(logs: Path | None) -> str:
    """Where this run trained itself."""
    lines = read_lines(logs / "train.jsonl")[0] if logs else []
    points = [(line["step"], line["values"][SPEED]) for line in lines if "step" in line and SPEED in line["values"]]
    return svg.lines("pairs per second", {SPEED: points})


def _held_out(root: Path) -> list[str]:
    bins, margins = (_csv(root / METRICS / name) for name in ("calibration.csv", "margins.csv"))
    sure = {"policy": [(row["confidence"], row["accuracy"]) for row in bins]}
    return [
        svg.lines("how sure, and how often right", sure, diagonal=True) if bins else "",
        svg.bars("reward margins of pairs", [(row["margin"], row["pairs"]) for row in margins]),
    ]


def _tables(metrics: dict[str, Any]) -> str:
    made = ""
    for name, groups in metrics.get("tables", {}).items():
        rows = [
            (key, row["pairs"], f"{row['accuracy']:.1%}", f"{row['margin']:.3f}", f"{row['kl']:.3f}")
            for key, row in groups.items()
        ]
        made += table((f"by {name}", "pairs", "accuracy", "margin", "kl"), rows)
    bias = metrics.get("length_bias", {})
    return made + table(("length bias", ""), [(name, f"{value:.4g}") for name, value in bias.items()])


def _samples(lines: list[dict[str, Any]]) -> str:
    """A mix: won, lost and tied ones in turn, as far as there are, then those without a verdict."""
    groups = [[line for line in lines if line.get("outcome") == outcome] for outcome in (1.0, 0.0, 0.5)]
    mixed = [line for row in zip_longest(*groups) for line in row if line is not None]
    rest = [line for line in lines if line.get("outcome") not in OUTCOMES]
    return "".join(_sample(line) for line in [*mixed, *rest][:SHOWN])


def _sample(line: dict[str, Any]) -> str:
    outcome = OUTCOMES.get(line.get("outcome", -1.0), "")
    return _pair(
        line["prompt"], "prompt", ("before", line["base"]["text"]), (f"after {outcome}", line["policy"]["text"])
    )


def _disagreements(lines: list[dict[str, Any]]) -> str:
    wrong = [line for line in lines if line["margin"] <= 0][:SHOWN]
    if not wrong:
        return '<p class="soft">None: it prefers the chosen answer of every held-out pair.</p>' if lines else ""
    return "".join(
        _pair(
            line["prompt"],
            f"margin {line['margin']:.3f}, pair {escape(line['id'])}",
            ("chosen", line["chosen"]),
            ("rejected", line["rejected"]),
        )
        for line in wrong
    )


def _pair(prompt: str, tag: str, *sides: tuple[str, str]) -> str:
    """A prompt and two texts, beside each other where there is room. Tags are ours and not escaped."""
    columns = "".join(f'<div><span class="tag">{name}</span><p>{text(content)}</p></div>' for name, content in sides)
    return (
        f'<div class="sample"><span class="tag">{tag}</span><p>{text(prompt)}</p><div class="two">{columns}</div></div>'
    )


def _data(report: dict[str, Any]) -> str:
    if not report:
        return ""
    pairs, tokens = report["pairs"], report["tokens"]
    shown = [
        ("source", report["source"]),
        ("rows", f"{report['rows']}, read as {', '.join(sorted(set(report['format'].values())))}"),
        ("pairs", f"{pairs['train']} to train on, {pairs['eval']} held out"),
        ("left out", ", ".join(f"{number} {name}" for name, number in report["left_out"].items()) or "nothing"),
        ("truncated", report["truncated"]),
        ("tokens (mean)", ", ".join(f"{part} {values['mean']:g}" for part, values in tokens.items())),
        ("template", report["template"]),
        *(("note", warning) for warning in report["warnings"]),
    ]
    return table(("data card", ""), [(name, str(value)) for name, value in shown])


def _lineage(manifest: dict[str, Any], decision: dict[str, Any]) -> str:
    if not manifest:
        return ""
    made = manifest["made"]
    rows = [
        ("manifest sha256", decision.get("manifest_sha256", "")),
        ("data", f"{manifest['data']['source']} ({manifest['data']['sha256']})"),
        ("base model", f"{manifest['base']['model']} ({manifest['base']['sha256']})"),
        ("code", f"{made['commit']}, {'clean' if made['clean'] else 'with uncommitted changes'}"),
        ("environment", ", ".join(f"{name} {number}" for name, number in made["packages"].items())),
        ("hardware", ", ".join(f"{name} {value}" for name, value in made["hardware"].items())),
    ]
    params = html.escape(json.dumps(manifest["params"], indent=2, ensure_ascii=False))
    return (
        table(("what", "which"), rows) + f"<details><summary>params</summary><pre><code>{params}</code></pre></details>"
    )


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _csv(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def main() -> None:
    if not (METRICS / "evaluate.json").exists():
        sys.exit("error: there is no result yet (data/metrics/evaluate.json). Run `make demo`, or `dvc repro`.")
    target = Path(".scratch/report.html")
    target.parent.mkdir(exist_ok=True)
    target.write_text(page(Path(), Path.cwd().name))
    print(target)


if __name__ == "__main__":
    main()
