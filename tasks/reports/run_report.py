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

from tasks.artifacts.evaluation import Headline
from tasks.artifacts.markup import printable, templates
from tasks.config.paths import METRICS
from tasks.errors import UserError
from tasks.reports.cost import costs, gpu_costs
from tasks.reports.summary import RunSummary
from tasks.secrets.redact import redact
from tasks.tracking import plots
from tasks.tracking.results import read_csv

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


def page(run: RunSummary, links: Mapping[str, str | None] = MappingProxyType({})) -> str:
    """`links`: addresses of this run elsewhere, by name; one that is no web page (a branch) is shown as text."""
    content = {
        "title": run.name,
        "links": {name: address for name, address in links.items() if address},
        "promoted": bool(run.decision.get("promoted")),
        "verdict": run.verdict,
        "headline": [_headline(metric) for metric in run.headlines],
        "comparisons": _comparisons(run.decision),
        "curves": _drawn([*_curves(run), _speed(run)]),
        "held_out": _drawn(_held_out(run.root)),
        "tables": _tables(run.evaluation),
        "samples": _samples(run.samples),
        "evaluated_pairs": bool(run.pairs),
        "wrong_pairs": [pair for pair in run.pairs if pair["margin"] <= 0][:EXAMPLES],
        "data": _data(run.data),
        "lineage": _lineage(run.manifest, run.decision),
        "params": json.dumps(run.manifest.get("params"), indent=2, ensure_ascii=False),
        "costs": costs(run),
        "gpu_head": ("stage", "GPU hours", *([] if run.cluster.price_per_gpu_hour is None else [run.cluster.currency])),
        "gpu_costs": gpu_costs(run),
    }
    return redact(_render(content))


def _render(content: Mapping[str, Any]) -> str:
    environment = templates(Path(__file__).parent, autoescape=True)
    environment.finalize = lambda value: value if isinstance(value, Markup) else printable(value)
    return environment.get_template("run_report.html").render(content)


def _headline(metric: Headline) -> dict[str, Any]:
    form, (low, high) = ".1%" if metric.is_share else ".3g", metric.interval or (None, None)
    shown: dict[str, Any] = {"label": metric.label, "value": f"{metric.value:{form}}", "low": None, "bar": None}
    if low is not None and high is not None:
        shown |= {"low": f"{low:{form}}", "high": f"{high:{form}}"}
        shown["bar"] = (f"{low:.1%}", f"{max(0.0, 1 - high):.1%}") if metric.is_share else None
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


def _curves(run: RunSummary) -> list[str]:
    return [plots.line_svg(title, plots.by_metric(run.curves, names)) for title, names in CURVES]


def _speed(run: RunSummary) -> str:
    """Empty where this run did not train."""
    points = [(line["step"], line["values"][SPEED]) for line in run.steps("train") if SPEED in line["values"]]
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


def write() -> None:
    """Write the report of this workspace's last result."""
    if not (METRICS / "evaluate.json").exists():
        raise UserError("There is no result yet (data/metrics/evaluate.json). Run `dpo run`, or `dvc repro`.")
    target = Path(".scratch/report.html")
    target.parent.mkdir(exist_ok=True)
    target.write_text(page(RunSummary.here()))
    print(target)
