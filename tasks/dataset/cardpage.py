"""The data card as pages. Text from the data is data: it is escaped wherever it is shown."""

import html
from collections.abc import Sequence
from typing import Any

from tasks.dataset.histograms import lengths_figure, sources_figure
from tasks.dataset.violations import BAD, VIOLATIONS
from tasks.reports.markup import plain

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .6rem 0 } td, th { padding: .15rem .8rem .15rem 0; text-align: left }
th { border-bottom: 1px solid #999 } pre { white-space: pre-wrap; background: #f6f6f4; padding: .6rem; font-size: 13px }
.chosen { color: #2a7f4f; font-weight: 600 } .rejected { color: #b5443c; font-weight: 600 } .not { color: #777 }
.note { border-left: 4px solid #d9a400; padding-left: .8rem } svg { max-width: 100%; height: auto }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a page that could load or run nothing
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # head, rows
Section = tuple[str, list[Table | str]]


def sections(report: dict[str, Any], changes: list[list[str]]) -> list[Section]:
    """The card's tables and sentences, whatever they are shown on."""
    made: list[Section] = [("Pairs", [_sources(report), f"Template: {report['template']}."])]
    if report["warnings"]:
        made.append(("Beware", [f"{warning[0].upper()}{warning[1:]}." for warning in report["warnings"]]))
    if changes:
        made.append(("Since the previous version", [(("", "before", "now"), changes)]))
    made.append(("Tokens", [_tokens(report), _truncation(report)]))
    made.append(("Shortcuts", [_shortcuts(report)]))
    if report["left_out"]:
        made.append(("Left out", [_left_out(report), _examples(report)]))
    return made


def markdown(report: dict[str, Any], previews: list[Any], changes: list[list[str]]) -> str:
    lines = [f"# Data card: {plain(report['source'])}", ""]
    for title, blocks in sections(report, changes):
        lines += [f"## {title}", ""]
        for block in blocks:
            lines += [plain(block), ""] if isinstance(block, str) else [*_markdown_table(block), ""]
    lines += ["## As the model sees them", "", "What stands in «» counts.", ""]
    for pair in previews:
        for part, pieces in pair.items():
            text = "".join(f"«{text}»" if counts else text for text, counts in pieces)
            lines += [f"    {line}" for line in [f"{part}:", *text.splitlines()]]
        lines.append("")
    return "\n".join(lines)


def page(report: dict[str, Any], previews: list[Any], changes: list[list[str]]) -> str:
    """One page that needs nothing else."""
    title = html.escape(f"Data card: {report['source']}")
    body = [f"<h1>{title}</h1>"]
    for name, blocks in sections(report, changes):
        kind = ' class="note"' if name == "Beware" else ""
        inner = "".join(f"<p>{html.escape(b)}</p>" if isinstance(b, str) else _html_table(b) for b in blocks)
        body.append(f"<section{kind}><h2>{name}</h2>{inner}</section>")
    body.append(f"<h2>Plots</h2>{lengths_figure(report)}{sources_figure(report)}")
    body.append("<h2>As the model sees them</h2><p>Coloured tokens count.</p>" + "".join(map(_preview, previews)))
    guard = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    head = f'<meta charset="utf-8">{guard}<title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _sources(report: dict[str, Any]) -> Table:
    rows = [
        [name, one["format"], str(one["rows"]), str(one["train"]), str(one["eval"]), str(sum(one["left_out"].values()))]
        for name, one in report["by_source"].items()
    ]
    return ("source", "row shape", "rows", "train", "eval", "left out"), rows


def _tokens(report: dict[str, Any]) -> Table:
    names = ("mean", "p5", "p50", "p95", "max")
    return ("", *names), [[part, *(str(spread[n]) for n in names)] for part, spread in report["tokens"].items()]


def _truncation(report: dict[str, Any]) -> str:
    merged = report["tokenizer_merged_across_the_border"]
    return f"{report['truncated']} pairs were truncated. The tokenizer merged across the border of {merged} pairs."


def _shortcuts(report: dict[str, Any]) -> Table:
    facts = report["shortcuts"]
    return ("", "share"), [
        ["chosen is the longer answer (a draw counts half)", f"{facts['chosen_longer']:.1%}"],
        ["chosen answers that end", f"{facts['chosen_ends']:.1%}"],
        ["rejected answers that end", f"{facts['rejected_ends']:.1%}"],
        ["a bag-of-words probe is right on held-out pairs", f"{facts['probe_accuracy']:.1%}"],
    ]


def _left_out(report: dict[str, Any]) -> Table:
    def by_source(name: str) -> str:
        counts = {source: one["left_out"].get(name, 0) for source, one in report["by_source"].items()}
        return ", ".join(f"{source} {count}" for source, count in counts.items() if count)

    rows = [
        [name, VIOLATIONS[name], "quarantined" if name in BAD else "left out", str(count), by_source(name)]
        for name, count in report["left_out"].items()
    ]
    return ("violation", "meaning", "", "pairs", "by source"), rows


def _examples(report: dict[str, Any]) -> Table:
    rows = [
        [name, f"{one['file']}, row {one['row']}", one["reason"], one["content"]]
        for name, examples in report["examples"].items()
        for one in examples
    ]
    return ("violation", "where", "what", "row"), rows


def _markdown_table(table: Table) -> list[str]:
    head, rows = table
    lines = [[plain(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return ["| " + " | ".join(line) + " |" for line in lines]


def _html_table(table: Table) -> str:
    head, rows = table
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _preview(pair: dict[str, list[list[Any]]]) -> str:
    lines = []
    for part, pieces in pair.items():
        texts = (f'<span class="{part if counts else "not"}">{html.escape(text)}</span>' for text, counts in pieces)
        lines.append(f"<b>{part}</b>\n{''.join(texts)}")
    return f"<pre>{chr(10).join(lines)}</pre>"
