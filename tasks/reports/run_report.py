"""The run report: one self-contained HTML page. run_report.html is its template; Jinja escapes every text from data.

`dpo report` writes .scratch/report.html from the workspace; the flow writes one for each run.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from markupsafe import Markup

from tasks.artifacts.markup import printable, templates
from tasks.config.cluster import load_cluster
from tasks.config.metrics import headlines, interval
from tasks.config.paths import CARD, METRICS, MODEL
from tasks.errors import UserError
from tasks.reports.cost import costs, gpu_costs
from tasks.reports.headline import decision_of, verdict
from tasks.secrets.redact import redact
from tasks.system.files import read_json_lines, read_json_or_empty
from tasks.tracking import plots
from tasks.tracking.journal import flatten_metrics
from tasks.tracking.journal_reader import read_journal
from tasks.tracking.results import curves, read_csv

EXAMPLES = 8  # sampled answers, and pairs with a negative margin
OUTCOMES = {1.0: "won", 0.0: "lost", 0.5: "tied"}
CURVES = (
    *plots.PANELS,
    ("reward margin", ("rewards/margins", "eval/rewards/margins")),
    ("KL to the reference", ("kl", "eval/kl")),
    ("gradient norm", ("grad_norm",)),
    ("learning rate", ("learning_rate",)),
)
SPEED = "pairs_per_second"  # in the run's journal; train.csv is a result and has no speeds
Table = tuple[Sequence[str], list[Sequence[Any]]]


def page(
    root: Path,
    title: str,
    states: Sequence[Mapping[str, Any]] = (),
    *,
    logs: Path | None = None,
    links: Mapping[str, str | None] = MappingProxyType({}),
) -> str:
    """`links`: addresses of this run elsewhere, by name; one that is no web page (a branch) is shown as text."""
    metrics, decision = read_json_or_empty(root / METRICS / "evaluate.json"), decision_of(root)
    manifest, pairs = read_json_or_empty(root / MODEL / "manifest.json"), _json_lines(root / METRICS / "pairs.jsonl")
    promoted, sentence = verdict(metrics, decision)
    cluster = load_cluster(root)
    content = {
        "title": title,
        "links": {name: address for name, address in links.items() if address},
        "promoted": promoted,
        "verdict": sentence,
        "headline": _headline(metrics),
        "comparisons": _comparisons(decision),
        "curves": _drawn([*_curves(root), _speed(logs)]),
        "held_out": _drawn(_held_out(root)),
        "tables": _tables(metrics),
        "samples": _samples(_json_lines(root / METRICS / "samples.jsonl")),
        "evaluated_pairs": bool(pairs),
        "wrong_pairs": [pair for pair in pairs if pair["margin"] <= 0][:EXAMPLES],
        "data": _data(read_json_or_empty(root / CARD / "report.json")),
        "lineage": _lineage(manifest, decision),
        "params": json.dumps(manifest.get("params"), indent=2, ensure_ascii=False),
        "costs": costs(root, states, logs=logs),
        "gpu_head": ("stage", "GPU hours", *([cluster.currency] if cluster.price_per_gpu_hour else [])),
        "gpu_costs": gpu_costs(cluster, logs) if logs else [],
    }
    return redact(_render(content))


def _render(content: Mapping[str, Any]) -> str:
    environment = templates(Path(__file__).parent, autoescape=True)
    environment.finalize = lambda value: value if isinstance(value, Markup) else printable(value)
    return environment.get_template("run_report.html").render(content)


def _headline(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    values, shown = flatten_metrics(metrics), []
    for name, label, is_share in headlines(values):
        form, bounds = ".1%" if is_share else ".3g", interval(values, name)
        metric: dict[str, Any] = {"label": label, "value": f"{values[name]:{form}}", "low": None, "bar": None}
        if bounds:
            low, high = bounds
            metric |= {"low": f"{low:{form}}", "high": f"{high:{form}}"}
            metric["bar"] = (f"{low:.1%}", f"{max(0.0, 1 - high):.1%}") if is_share else None
        shown.append(metric)
    return shown


def _comparisons(decision: dict[str, Any]) -> list[Table]:
    """On the current held-out set and, where the champion was evaluated on another one, on that too."""
    champion, earlier = f"version {decision.get('champion_before')}", decision.get("earlier") or {}
    sets = {
        "on the same prompts": decision.get("comparison"),
        f"on {champion}'s own held-out pairs": earlier.get("comparison"),
    }
    return [
        ((name, "this", champion, "difference", "95% interval"), [_compared(*item) for item in comparison.items()])
        for name, comparison in sets.items()
        if comparison
    ]


def _compared(metric: str, row: Mapping[str, float]) -> tuple[str, ...]:
    bounds = f"{row['low']:+.4f} to {row['high']:+.4f}"
    return metric, f"{row['ours']:.4g}", f"{row['theirs']:.4g}", f"{row['difference']:+.4f}", bounds


def _drawn(figures: list[str]) -> list[Markup]:
    return [Markup(figure) for figure in figures if figure]


def _curves(root: Path) -> list[str]:
    steps = curves(root)
    return [plots.line_svg(title, plots.by_metric(steps, names)) for title, names in CURVES]


def _speed(logs: Path | None) -> str:
    """Empty where this run did not train."""
    lines = read_journal(logs / "train.jsonl")[0] if logs else []
    points = [(line["step"], line["values"][SPEED]) for line in lines if "step" in line and SPEED in line["values"]]
    return plots.line_svg("pairs per second", {SPEED: points})


def _held_out(root: Path) -> list[str]:
    bins, margins = (read_csv(root / METRICS / name) for name in ("calibration.csv", "margins.csv"))
    return [
        plots.line_svg(
            "calibration: confidence and accuracy",
            {"policy": [(row["confidence"], row["accuracy"]) for row in bins]},
            diagonal=True,
        ),
        plots.bar_svg("reward margins of pairs", [(row["margin"], row["pairs"]) for row in margins]),
    ]


def _tables(metrics: dict[str, Any]) -> list[Table]:
    tables: list[Table] = []
    for name, groups in metrics.get("tables", {}).items():
        rows: list[Sequence[Any]] = [
            (key, row["pairs"], f"{row['accuracy']:.1%}", f"{row['margin']:.3f}", f"{row['kl']:.3f}")
            for key, row in groups.items()
        ]
        tables.append(((f"by {name}", "pairs", "accuracy", "margin", "kl"), rows))
    bias = metrics.get("length_bias", {})
    return [*tables, (("length bias", ""), [(name, f"{value:.4g}") for name, value in bias.items()])]


def _samples(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A mix: won, lost and tied samples in turn, then those without a verdict."""
    groups = [[line for line in lines if line.get("outcome") == outcome] for outcome in (1.0, 0.0, 0.5)]
    mixed = [line for row in zip_longest(*groups) for line in row if line is not None]
    rest = [line for line in lines if line.get("outcome") not in OUTCOMES]
    return [{**line, "verdict": OUTCOMES.get(line.get("outcome", -1.0), "")} for line in [*mixed, *rest][:EXAMPLES]]


def _data(report: dict[str, Any]) -> list[tuple[str, Any]]:
    if not report:
        return []
    pairs, tokens = report["pairs"], report["tokens"]
    return [
        ("source", report["source"]),
        ("rows", f"{report['rows']}, read as {', '.join(sorted(set(report['format'].values())))}"),
        ("pairs", f"{pairs['train']} for training, {pairs['eval']} held out"),
        ("left out", ", ".join(f"{number} {name}" for name, number in report["left_out"].items()) or "nothing"),
        ("truncated", report["truncated"]),
        ("tokens (mean)", ", ".join(f"{part} {values['mean']:g}" for part, values in tokens.items())),
        ("template", report["template"]),
        *(("note", warning) for warning in report["warnings"]),
    ]


def _lineage(manifest: dict[str, Any], decision: dict[str, Any]) -> list[tuple[str, str]]:
    if not manifest:
        return []
    build = manifest["made"]
    return [
        ("manifest sha256", decision.get("manifest_sha256", "")),
        ("data", f"{manifest['data']['source']} ({manifest['data']['sha256']})"),
        ("base model", f"{manifest['base']['model']} ({manifest['base']['sha256']})"),
        ("code", f"{build['commit']}, {'clean' if build['clean'] else 'with uncommitted changes'}"),
        ("environment", ", ".join(f"{name} {number}" for name, number in build["packages"].items())),
        ("hardware", ", ".join(f"{name} {value}" for name, value in build["hardware"].items())),
    ]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return read_json_lines(path) if path.exists() else []


def write() -> None:
    """Write the report of this workspace's last result."""
    if not (METRICS / "evaluate.json").exists():
        raise UserError("There is no result yet (data/metrics/evaluate.json). Run `dpo run`, or `dvc repro`.")
    target = Path(".scratch/report.html")
    target.parent.mkdir(exist_ok=True)
    target.write_text(page(Path(), Path.cwd().name))
    print(target)
