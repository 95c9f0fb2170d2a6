"""The data card as HTML and Markdown, by the Jinja templates in templates/. Text from the data is always escaped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tasks.artifacts.markup import templates
from tasks.prepare.card.histograms import lengths_figure, sources_figure
from tasks.prepare.card.notes import sentences
from tasks.prepare.card.preview import mark_loss
from tasks.source.reject_reasons import QUARANTINED, REJECT_REASONS


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]


Section = tuple[str, list[Table | str]]


def render_html(report: dict[str, Any], previews: list[Any], changes: list[list[str]]) -> str:
    """One page that loads nothing else."""
    figures = [lengths_figure(report), sources_figure(report)]
    return _render("card.html.j2", report, changes, previews=previews, figures=figures)


def render_markdown(report: dict[str, Any], previews: list[Any], changes: list[list[str]]) -> str:
    return _render("card.md.j2", report, changes, previews=previews)


def _render(template: str, report: dict[str, Any], changes: list[list[str]], **values: Any) -> str:
    environment = templates(Path(__file__).parent / "templates", autoescape=template.endswith(".html.j2"))
    environment.filters["marked"] = mark_loss
    return environment.get_template(template).render(
        source=report["source"], sections=_sections(report, changes), **values
    )


def _sections(report: dict[str, Any], changes: list[list[str]]) -> list[Section]:
    """(title, tables and sentences), the same for both formats."""
    sections: list[Section] = [("Pairs", [_sources(report), f"Template: {report['template']}."])]
    if counts := report.get("unpaired"):
        sections[0][1].append(
            f"Unpaired rows: {counts['desirable']} desirable and {counts['undesirable']} undesirable answers. Below, "
            "chosen means desirable and rejected undesirable, and a pair is the n-th answer of each kind."
        )
    if report.get("notes") or report.get("unread_keys"):
        sections.append(("From turns to tokens", [*sentences(report["notes"], report["unread_keys"])]))
    if report["warnings"]:
        sections.append(("Warnings", [f"{warning[0].upper()}{warning[1:]}." for warning in report["warnings"]]))
    if changes:
        sections.append(("Since the previous version", [Table(("", "before", "now"), changes)]))
    sections.append(("Tokens", [_tokens(report), _truncation(report)]))
    sections.append(("Shortcuts", [_shortcuts(report)]))
    if report["left_out"]:
        sections.append(("Rejected rows", [_rejected(report), _examples(report)]))
    return sections


def _sources(report: dict[str, Any]) -> Table:
    rows = [
        [name, source["format"], source["rows"], source["train"], source["eval"], sum(source["left_out"].values())]
        for name, source in report["by_source"].items()
    ]
    return Table(("source", "row shape", "rows", "train", "eval", "rejected"), rows)


def _tokens(report: dict[str, Any]) -> Table:
    names = ("mean", "p5", "p50", "p95", "max")
    return Table(("", *names), [[part, *(spread[n] for n in names)] for part, spread in report["tokens"].items()])


def _truncation(report: dict[str, Any]) -> str:
    merged = report["tokenizer_merged_across_the_border"]
    return f"{report['truncated']} pairs were truncated. In {merged} pairs the tokenizer merged prompt and response."


def _shortcuts(report: dict[str, Any]) -> Table:
    names = {
        "chosen_longer": "chosen is the longer answer (equal length counts half)",
        "chosen_ends": "chosen answers with an end token",
        "rejected_ends": "rejected answers with an end token",
        "probe_accuracy": "accuracy of a bag-of-words probe on held-out pairs",
    }
    return Table(("", "share"), [[text, f"{report['shortcuts'][name]:.1%}"] for name, text in names.items()])


def _rejected(report: dict[str, Any]) -> Table:
    rows = []
    for name, count in report["left_out"].items():
        counts = {source: values["left_out"].get(name, 0) for source, values in report["by_source"].items()}
        by_source = ", ".join(f"{source} {number}" for source, number in counts.items() if number)
        fate = "quarantined" if name in QUARANTINED else "skipped"
        rows.append([name, REJECT_REASONS[name], fate, count, by_source])
    return Table(("reason", "meaning", "", "pairs", "by source"), rows)


def _examples(report: dict[str, Any]) -> Table:
    rows = [
        [name, f"{example['file']}, row {example['row']}", example["reason"], example["content"]]
        for name, examples in report["examples"].items()
        for example in examples
    ]
    return Table(("reason", "where", "what is wrong", "row"), rows)
