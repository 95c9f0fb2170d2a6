"""The run report: it needs nothing but itself, shows hostile text as text, and real Chromium shows it all."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tasks.config.cluster import Cluster
from tasks.config.paths import CARD
from tasks.errors import UserError
from tasks.reports import cost
from tasks.reports.cost import costs
from tasks.reports.headline import verdict
from tasks.reports.run_report import page
from tasks.reports.summary import RunSummary
from tasks.tracking.journal import StageJournal
from tasks.tracking.plots import bar_svg, line_svg
from tests.support.workspaces import PROJECT, write_cluster

HOSTILE = '<script>document.title="owned"</script><img src=http://evil.test/x onerror=alert(1)> \u202e & "'
WON = {"win_rate": {"rate": 0.75, "low": 0.7, "high": 0.8}, "rewards/accuracies": 0.9}
STATES = [
    {"stage": "train", "state": "ran", "seconds": 10.0},
    {"stage": "export", "state": "cached", "seconds": 0.0},
]
DECISION = {
    "model": "dpo-demo",
    "version": "3",
    "alias": "champion",
    "promoted": False,
    "waiting": False,
    "reasons": [f"a reason {HOSTILE}"],
    "champion_before": "2",
    "comparison": {"win_rate": {"ours": 0.4, "theirs": 0.5, "difference": -0.1, "low": -0.2, "high": 0.0, "count": 9}},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    metrics = tmp_path / "data" / "metrics"
    metrics.mkdir(parents=True)
    (tmp_path / "infra").mkdir()
    write_cluster(tmp_path, {"actor_train.num_workers": 4})
    evaluated = {**WON, "tables": {"source": {HOSTILE: {"pairs": 2, "accuracy": 1.0, "margin": 0.5, "kl": 0.1}}}}
    (metrics / "evaluate.json").write_text(json.dumps(evaluated))
    (metrics / "promote.json").write_text(json.dumps(DECISION))
    (metrics / "train.csv").write_text("step,loss,tokens\n1,0.7,500\n2,0.5,700\n")
    (metrics / "calibration.csv").write_text("confidence,accuracy,pairs\n0.9,0.8,10\n")
    (metrics / "margins.csv").write_text("margin,pairs\n-1.0,2\n1.0,8\n")
    sample = {"prompt": HOSTILE, "base": {"text": HOSTILE}, "policy": {"text": HOSTILE}, "outcome": 0.0}
    (metrics / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    pair = {"id": "1", "prompt": HOSTILE, "margin": -1.0, "chosen": HOSTILE, "rejected": HOSTILE}
    (metrics / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    return tmp_path


def test_the_page_loads_nothing_and_runs_nothing(root: Path):
    html = page(RunSummary(f"run {HOSTILE}", root, states=STATES))
    assert not re.search(r"<(script|img|link|iframe|object|base|form)\b", html)
    assert not re.search(r"<[^>]*\s(src|href|on\w+)\s*=", html)
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html
    assert "\u202e" not in html
    assert html.count("&lt;script&gt;") >= 8  # shown wherever it stands: title, reason, table, texts


def test_the_page_says_what_happened(root: Path):
    html = page(RunSummary("run", root, states=STATES))
    assert "Better than its base model: wins 75.0% (70.0% to 80.0%) of judged prompts." in html
    assert "is not promoted, because a reason" in html
    assert "<td>-0.1000</td><td>-0.2000 to +0.0000</td>" in html
    # 10 seconds on 4 workers; 500 + 700 tokens in 10 seconds
    cells = ("train", "ran", "10.0", "40.0", "1,200", "120")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in html
    assert "<td>export</td><td>cached</td><td></td>" in html


def test_costs_are_those_of_the_stages_that_ran(root: Path):
    """Reference: 10 pairs of 10 + 5 + 3 tokens on 2 workers in 4 s. Train: 1200 tokens on 4 workers in 10 s, of which
    it measured 500 / 100 + 700 / 350 = 7 s of training."""
    write_cluster(root, {"reference.num_workers": 2, "actor_train.num_workers": 4, "inference.num_workers": 3})
    (root / CARD).mkdir(parents=True)
    tokens = {"prompt": {"mean": 10.0}, "chosen": {"mean": 5.0}, "rejected": {"mean": 3.0}}
    (root / CARD / "report.json").write_text(json.dumps({"pairs": {"train": 8, "eval": 2}, "tokens": tokens}))
    (root / "logs").mkdir()
    run = StageJournal(root / "logs", "train")
    run.metrics(1, {"loss": 0.7, "tokens": 500.0, "tokens_per_second": 100.0})
    run.metrics(1, {"eval/loss": 0.6})
    run.metrics(2, {"loss": 0.5, "tokens": 700.0, "tokens_per_second": 350.0})
    run.summary({"loss": 0.5})
    states = [{"stage": "reference", "state": "ran", "seconds": 4.0}, *STATES]
    states.append({"stage": "evaluate", "state": "ran", "seconds": 5.0})
    assert costs(RunSummary("run", root, root / "logs", states)) == [
        ("reference", "ran", "4.0", "8.0", "180", "45"),
        ("train", "ran", "10.0", "40.0", "1,200", "171"),
        ("export", "cached", "", "", "", ""),
        ("evaluate", "ran", "5.0", "15.0", "", ""),
    ]


def test_gpu_hours_count_every_attempt_and_have_a_price_where_the_site_sets_one(root: Path):
    """Train on 8 GPUs: an attempt killed after 90 min, the next one took 30: 16 hours. Export on one GPU: half an hour.
    Prepare holds none. At 2.5 an hour 41.25 in all."""
    groups = {"actor_train.num_workers": 8, "actor_train.gpus_per_worker": 1, "inference.num_workers": 4}
    write_cluster(root, {**groups, "inference.gpus_per_worker": 1})
    logs, minute = root / "logs", 60_000
    logs.mkdir()

    def journal(stage: str, *lines: tuple[str, int]) -> None:
        text = [json.dumps({"kind": kind, "time": 10**12 + at * minute, "values": {}}) for kind, at in lines]
        (logs / f"{stage}.jsonl").write_text("\n".join(text) + "\n")

    journal("prepare", ("start", 0), ("end", 60))
    journal("train", ("start", 0), ("progress", 90), ("start", 200), ("progress", 210), ("end", 230))
    journal("export", ("start", 0), ("end", 30), ("start", 40), ("progress", 10))  # runs, on an older training
    run = RunSummary("run", root, logs, STATES)
    cluster = run.cluster
    assert cost.gpu_hours(run) == {"train": 16.0, "export": 0.5}
    assert cost.metrics(run) == {"cost/gpu_hours": 16.5}
    split = {**cluster.model_dump(), "inference": {**cluster.inference.model_dump(), "zero_stage": 3}}
    assert cost.gpus(Cluster.model_validate(split), "export") == 4  # the group shares the model
    assert cost.in_words(cluster, 16.5) == "16.50 GPU hours"
    assert "<th>GPU hours</th></tr>" in page(run)
    write_cluster(root, {**groups, "inference.gpus_per_worker": 1, "price_per_gpu_hour": 2.5, "currency": "USD"})
    run = RunSummary("run", root, logs, STATES)
    assert cost.metrics(run) == {"cost/gpu_hours": 16.5, "cost/USD": 41.25}
    assert cost.in_words(run.cluster, 16.5) == "16.50 GPU hours, 41.25 USD"
    assert "<td>the run</td><td>16.50</td><td>41.25</td>" in page(run)
    write_cluster(root, {})
    assert cost.metrics(RunSummary("run", root, logs)) == {}  # no GPUs
    assert "GPU hours" not in page(RunSummary("run", root, logs, STATES))


@pytest.mark.slow
def test_a_failed_run_has_its_cost_in_mlflow(tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch):
    """Two workers with a GPU each for an hour."""
    from mlflow import MlflowClient

    from flows import artifacts
    from tasks.runs.workspace import Workspace

    store = f"sqlite:///{shutil.copytree(mlflow_store, tmp_path / 'store')}/mlflow.db"
    site = {"logging_dir": str(tmp_path / "runs"), "tracking_uri": store, "price_per_gpu_hour": 2.5}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({**site, "actor_train": {"gpus_per_worker": 1}}))
    monkeypatch.setenv("DPO_CLUSTER", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("DPO_HOME", str(PROJECT))
    run = Workspace(PROJECT, "failed")

    def fail() -> None:
        lines = [{"kind": "start", "time": 0}, {"kind": "end", "time": 3_600_000, "status": "FAILED"}]
        (run.run_folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        raise UserError("failed")

    with pytest.raises(UserError), artifacts.recorded(run, {}):
        fail()
    client = MlflowClient(store)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (recorded,) = client.search_runs(experiments, "tags.pipeline_run = 'failed'")
    assert (recorded.data.metrics["cost/gpu_hours"], recorded.data.metrics["cost/EUR"]) == (2.0, 5.0)


def test_a_decision_about_another_export_is_not_told(root: Path):
    (root / "data" / "model").mkdir()
    (root / "data" / "model" / "manifest.json").write_text("{}")
    assert RunSummary("run", root).decision == {}
    (root / "data" / "metrics" / "promote.json").write_text(
        json.dumps({**DECISION, "manifest_sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"})
    )  # sha256 of "{}"
    assert RunSummary("run", root).decision["version"] == "3"


def test_a_page_of_nothing_is_still_a_page(tmp_path: Path):
    (tmp_path / "infra").mkdir()
    write_cluster(tmp_path, {})
    assert "Not evaluated. Not registered yet" in page(RunSummary("empty", tmp_path))


@pytest.mark.parametrize(
    ("low", "high", "result"),
    [(0.51, 0.6, "Better than"), (0.4, 0.6, "No clear difference from"), (0.3, 0.49, "Worse than")],
)
def test_the_verdict_follows_the_interval_and_not_the_mean(low: float, high: float, result: str):
    assert verdict({"win_rate/rate": 0.5, "win_rate/low": low, "win_rate/high": high}, {}).startswith(result)


def test_charts_draw_what_they_are_given():
    chart = line_svg("a <title>", {"x": [(0, 1.0), (1, 2.0)], "gap": [(0, float("nan"))]})
    assert chart.count("stroke: var(--c0)") >= 1
    assert "var(--c1)" not in chart  # a series without a finite point is not drawn
    assert 'aria-label="a &lt;title&gt;"' in chart
    assert "<title>" not in chart
    assert line_svg("none", {"x": []}) == bar_svg("none", []) == ""
    assert bar_svg("histogram", [(0.0, 1.0), (1.0, 3.0)]).count("fill: var(--c0)") == 2


def test_training_curves_have_ticks_and_the_speed_is_the_journals(root: Path):
    rows = "".join(f"{step},{step / 10},{step / 100},{step / 5},0.001,0.5\n" for step in range(1, 63))
    head = "step,rewards/margins,kl,grad_norm,learning_rate,eval/loss\n"
    (root / "data" / "metrics" / "train.csv").write_text(head + rows)
    (root / "logs").mkdir()
    StageJournal(root / "logs", "train").metrics(5, {"pairs_per_second": 9.0})
    html = page(RunSummary("run", root, root / "logs", STATES))
    for title in ("reward margin", "KL to the reference", "gradient norm", "learning rate", "pairs per second"):
        assert f'aria-label="{title}"' in html
    assert len(re.findall(r"text-anchor: middle[^>]*>40</text>", html)) == 5  # a tick of each curve by step


def test_samples_are_a_mix_of_won_lost_and_tied(root: Path):
    def sample(number: int, outcome: float) -> str:
        return json.dumps({"prompt": f"p{number}", "base": {"text": "a"}, "policy": {"text": "b"}, "outcome": outcome})

    outcomes = [1.0] * 20 + [0.5] * 20 + [0.0] * 2
    lines = [sample(number, outcome) for number, outcome in enumerate(outcomes)]
    (root / "data" / "metrics" / "samples.jsonl").write_text("\n".join(lines) + "\n")
    html = page(RunSummary("run", root))
    assert tuple(html.count(f'policy <b class="{outcome}">') for outcome in ("won", "lost", "tied")) == (3, 2, 3)


def test_links_lead_to_pages_and_to_nothing_else(root: Path):
    links = {
        "MLflow": 'http://127.0.0.1:5000/#/experiments/1?a="b',
        "branch": "runs/x",
        "Prefect": None,
        "odd": "javascript:1",
    }
    html = page(RunSummary("run", root), links)
    assert '<a href="http://127.0.0.1:5000/#/experiments/1?a=&#34;b" rel="noopener noreferrer">MLflow</a>' in html
    assert "branch <code>runs/x</code>" in html
    assert html.count("<a ") == 1
    assert "Prefect" not in html


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_chromium_shows_it_and_is_not_taken_over(root: Path, tmp_path: Path):
    target = tmp_path / "report.html"
    target.write_text(page(RunSummary("run", root, states=STATES)))
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    profile = [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=390,844"]
    shown = subprocess.run(
        [*browser, *profile, f"--screenshot={tmp_path / 'phone.png'}", "--dump-dom", target.as_uri()],
        capture_output=True,
        text=True,
        timeout=900,
    ).stdout
    assert "<title>run</title>" in shown  # no script of the data has run
    assert "Comparison with the champion" in shown
    assert (tmp_path / "phone.png").stat().st_size > 5000
