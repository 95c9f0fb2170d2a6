"""One reading of a run behind every rendering: they show the same metrics, intervals, examples and decision."""

from pathlib import Path
from typing import Any

import pytest

from flows import artifacts
from tasks.artifacts.evaluation import HEADLINE_METRICS
from tasks.config.params import load_params
from tasks.config.paths import METRICS
from tasks.export.card import model_card
from tasks.reports import run_report, terminal
from tasks.reports.summary import RunSummary
from tasks.system.files import json_lines, write_json
from tests.export.test_card import REPORT, manifest
from tests.support.workspaces import PROJECT, write_cluster

BOUNDS = {"low": 0.125, "high": 0.875}
EVALUATION: dict[str, Any] = {
    "pairs": 4.0,
    "rewards/accuracies": 0.5,
    "rewards/margins": 0.25,
    "kl/answers": 0.375,
    "calibration": {"expected_error": 0.0625},
    "health": {"repetition": 0.03125, "length_ratio": 0.75},
    "win_rate": {"rate": 0.625, **BOUNDS, "length_controlled": {"rate": 0.5625, **BOUNDS}},
    "intervals": {"rewards/accuracies": BOUNDS, "rewards/margins": BOUNDS, "kl/answers": BOUNDS},
}


def sample(prompt: str, base: str, is_kind: bool, policy: str, is_policy_kind: bool) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "base": {"text": base, "kind": is_kind},
        "policy": {"text": policy, "kind": is_policy_kind},
    }


SAMPLES = [
    sample("the same", "a", True, "a", True),
    sample("other words", "a", True, "b", True),
    sample("better", "a", False, "b", True),
    sample("worse", "a", True, "b", False),
]


@pytest.fixture
def run(tmp_path: Path) -> RunSummary:
    (tmp_path / "infra").mkdir()
    write_cluster(tmp_path, {})
    write_json(tmp_path / METRICS / "evaluate.json", EVALUATION)
    (tmp_path / METRICS / "samples.jsonl").write_text(json_lines(SAMPLES))
    return RunSummary("one", tmp_path)


def test_every_rendering_shows_every_headline_metric_with_its_interval(run: RunSummary) -> None:
    assert [metric.name for metric in run.headlines] == [name for name, *_ in HEADLINE_METRICS]
    assert [metric.name for metric in run.headlines if metric.interval] == [
        "win_rate/rate",
        "win_rate/length_controlled/rate",
        "rewards/accuracies",
        "rewards/margins",
        "kl/answers",
    ]
    card = model_card(load_params(PROJECT / "params.yaml"), manifest(metrics=EVALUATION), {**REPORT, "left_out": {}})
    text, page = artifacts.description(run), run_report.page(run)
    for metric in run.headlines:
        bounds = "0.125 to 0.875" if metric.interval else ""
        assert f"| {metric.label} | {metric.value:.4g} | {bounds} |" in text
        assert f"| {metric.label} | {metric.value:.4g}{f' ({bounds})' if bounds else ''} |" in card
        assert f'<span class="soft">{metric.label}</span>' in page
    assert page.count('<span class="tag">12.5% to 87.5%</span>') + page.count("0.125 to 0.875") == 5


def test_the_examples_show_what_changed_first(run: RunSummary) -> None:
    assert [one["prompt"] for one in run.examples] == ["better", "worse", "other words", "the same"]
    listed = [line.split(" | ")[0].removeprefix("| ") for line in artifacts._samples(run).splitlines()[4:]]
    table = terminal._samples_table(run.examples[: terminal.SAMPLES])
    assert listed == [text.plain for text in table.columns[0].cells] == ["better", "worse", "other words"]


def test_a_summary_of_nothing_is_empty(tmp_path: Path) -> None:
    run = RunSummary("one", tmp_path, tmp_path / "none")
    assert (run.values, run.headlines, run.samples, run.pairs) == ({}, [], [], [])
    assert (run.decision, run.metrics, run.ids) == ({}, {}, {})
    assert run.verdict == "Not evaluated. Not registered yet: run `dpo promote`."
