"""Rows with scripts stay text on every page, in a real browser."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.config.params import load_params
from tasks.prepare.card import pages
from tasks.reports import run_report
from tasks.reports.summary import RunSummary
from tests.prepare.test_data_card import FACTS
from tests.support.browser import browser, chromium
from tests.support.workspaces import PROJECT, write_cluster

SCRIPT = "<script>window.owned=1;document.title='owned'</script><img src=x onerror=\"window.owned=1\">"
LINKS = (
    "[click](javascript:window.owned=1) ![x](http://evil.test/pixel.png) <a href='javascript:window.owned=1'>go</a> "
    "http://evil.test | `code` </pre><svg onload=window.owned=1>"
)


def hostile_report() -> dict[str, Any]:
    histogram = {"counts": [1, 2], "edges": [0, 1, 2]}
    spread = {**dict.fromkeys(("mean", "p5", "p50", "p95", "max"), 3), "histogram": histogram}
    example = {"file": f"a{SCRIPT}.jsonl", "row": 1, "reason": LINKS, "content": SCRIPT}
    one = {"format": "pairs", "rows": 5, "train": 2, "eval": 1, "left_out": {"tie": 2}}
    return {
        "source": f"pairs {SCRIPT} {LINKS}",
        "rows": 5,
        "format": {"a": "pairs"},
        "by_source": {SCRIPT: one},
        "pairs": {"train": 2, "eval": 1},
        "tokens": dict.fromkeys(("prompt", "chosen", "rejected"), spread),
        "lengths": {part: [1, 2] for part in ("prompt", "chosen", "rejected")},
        "left_out": {"tie": 2},
        "examples": {"tie": [example]},
        "template": LINKS,
        "truncated": 0,
        "tokenizer_merged_across_the_border": 0,
        "warnings": [SCRIPT, LINKS],
        "shortcuts": {**FACTS, "length_difference": histogram},
    }


def write_run(root: Path) -> None:
    """A run whose rows, reasons and names are hostile."""
    metrics = root / "data" / "metrics"
    metrics.mkdir(parents=True)
    (root / "infra").mkdir()
    write_cluster(root, {})
    (metrics / "evaluate.json").write_text(json.dumps({"rewards/accuracies": 0.5}))
    lines = [
        {"prompt": text, "base": {"text": text}, "policy": {"text": text}, "outcome": 1.0} for text in (SCRIPT, LINKS)
    ]
    (metrics / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pair = {"id": SCRIPT, "prompt": LINKS, "margin": -1.0, "chosen": SCRIPT, "rejected": LINKS}
    (metrics / "pairs.jsonl").write_text(json.dumps(pair) + "\n")


def model_card() -> str:
    from tasks.export import card

    params = load_params(PROJECT / "params.yaml")
    hostile = f"{SCRIPT} {LINKS}"
    manifest = {
        "model": "dpo-demo",
        "data": {"source": hostile, "sha256": "0" * 64, "rows": 5},
        "base": {"model": hostile, "sha256": "1" * 64},
        "licences": {"base": hostile, "data": hostile},
        "metrics": {"rewards/accuracies": 0.5},
        "checks": {"largest_logit_difference": 0.0},
        "made": {"commit": "c" * 40, "clean": True, "packages": {"torch": "2"}},
    }
    return card.model_card(params, manifest, hostile_report())


def rendered(markdown: str) -> str:
    """As a viewer that lets HTML pass and makes bare addresses links would show it."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    return f"<!doctype html><title>card</title>{body}"


@pytest.mark.slow
def test_in_a_real_browser_no_row_runs_anything_on_any_page(tmp_path, monkeypatch):
    chromium()
    root = tmp_path / "run"
    write_run(root)
    monkeypatch.setenv("SOME_PASSWORD", "0123-of-the-page")
    preview = [{part: [(SCRIPT, True), (LINKS, False)] for part in ("prompt", "chosen", "rejected")}]
    report = hostile_report()
    contents = {
        "report": run_report.page(RunSummary(f"run {SCRIPT} 0123-of-the-page", root)),
        "data": pages.render_html(report, preview, [["rows", SCRIPT, LINKS]]),
        "data-markdown": rendered(pages.render_markdown(report, preview, [["rows", SCRIPT, LINKS]])),
        "model-markdown": rendered(model_card().split("---\n", 2)[2]),
        "trap": f"<!doctype html><body>{SCRIPT}</body>",  # so that the test can fail
    }
    assert "0123-of-the-page" not in contents["report"]
    with browser(tmp_path / "profile") as shown:
        for name, content in contents.items():
            (tmp_path / f"{name}.html").write_text(content)
            shown.open((tmp_path / f"{name}.html").as_uri())
            if name == "trap":
                break
            shown.shows("<script>window.owned=1")  # the text is there, as text
            time.sleep(0.2)
            assert shown.evaluate("window.owned === undefined"), name
            reaching = (
                "[...document.querySelectorAll('script, img, iframe, svg[onload], a[href*=evil], a[href^=javascript]')]"
            )
            assert shown.evaluate(f"{reaching}.map(e => e.outerHTML)") == [], name
        until = time.monotonic() + 20
        while not shown.evaluate("window.owned === 1") and time.monotonic() < until:
            time.sleep(0.1)
        assert shown.evaluate("window.owned === 1")
