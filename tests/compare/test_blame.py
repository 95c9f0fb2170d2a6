"""`dpo blame` finds planted poison, and `source.exclude` trains without it."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from tasks.artifacts import demo
from tasks.artifacts.pairs import read_pairs
from tasks.compare import blame
from tasks.config.params import load_params
from tasks.prepare.rows.preference import is_held_out, prompt_hash
from tests.support.scoring import make_scorer
from tests.support.workspaces import make_workspace, refusal, run, write_data
from training.models import adapters
from training.models.loading import load_model
from training.objectives.metrics import pair_logps
from training.objectives.objective import Objective
from training.pairs import batches
from training.pairs.packing import build_row
from training.scoring.logps import row_logps

FLAGGED = {"flagged": True, "source": "feedback", "user": "mallory"}
CLEAN = {"flagged": False, "source": "feedback", "user": "ann"}


def test_a_user_stands_out_only_if_chance_does_not_explain_it() -> None:
    lines = [FLAGGED] * 6 + [{**CLEAN, "user": f"user {n % 9}"} for n in range(300)]
    # 6 of 306 pairs are flagged, and all 6 are of the only one with 6 pairs: 1 / C(306, 6), times 10 users.
    assert blame.concentration(lines, "user") == (
        "The user mallory stands out: 6 of 6 flagged pairs, but 6 of all 306 (p = 9e-12)."
    )
    assert blame.concentration(lines, "source") == ""  # one source has all pairs
    spread = [{**FLAGGED, "user": f"user {n}"} for n in range(9)] + [
        {**CLEAN, "user": f"user {n % 9}"} for n in range(300)
    ]
    assert blame.concentration(spread, "user") == ""


def train_here(base: Path) -> None:
    """The stage `train` as a plain loop, without Ray and DeepSpeed."""
    params = load_params().train
    assert params.adapter is not None
    pairs, objective = read_pairs("train", reference=True), Objective(params.loss, params.loss_options())
    model = adapters.add_adapter(load_model(base, "float32"), params.adapter.rank, 8.0, "all-linear", False, False, 0)
    scorer = make_scorer(model, pairs, torch.device("cpu"))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=params.learning_rate, weight_decay=0.0)
    for step in range(batches.total_steps(len(pairs), 8, 1, None)):
        row = build_row(pairs, batches.step_pairs(step, len(pairs), 8, 0))
        loss = objective.losses(pair_logps(row, row_logps(scorer, row), objective))["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    adapters.save_adapter(model, {name: value.detach() for name, value in trained.items()}, Path("data/policy"), "base")


@pytest.mark.slow
def test_planted_poison_is_found_and_can_be_left_out(
    tmp_path: Path, tiny_base: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows = demo.rows(0)[:250]
    train = [n for n, row in enumerate(rows) if not is_held_out(prompt_hash(row["prompt"]), 0.2)]
    planted = random.Random(0).sample(train, len(train) // 100)
    for n in planted:
        rows[n] = {**rows[n], "chosen": rows[n]["rejected"], "rejected": rows[n]["chosen"], "user": "mallory"}
    root = make_workspace(tmp_path / "workspace", tiny_base, **{"train.epochs": 1})
    write_data(root / "pairs.jsonl", [{"user": "ann", **row} for row in rows])
    shutil.copytree(mlflow_store, root / ".mlflow")
    run(root, "source", "prepare", "reference")
    monkeypatch.chdir(root)
    monkeypatch.delenv("DPO_HOME", raising=False)
    train_here(tiny_base)

    blame.blame(None, None, 5)
    folder = root / ".scratch/blame/checkout"
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert len(lines) == len(train)
    worst = lines[: len(planted)]
    assert sum(line["user"] == "mallory" for line in worst) / len(planted) >= 0.9  # precision at k
    assert {line["row"] for line in worst} == {n + 1 for n in planted}
    said = capsys.readouterr().out
    assert "pairs.jsonl:" in said

    write_data(root / "bad.jsonl", [{"id": line["id"]} for line in worst])
    text = (root / "params.yaml").read_text().replace("exclude: null", "exclude: bad.jsonl")
    (root / "params.yaml").write_text(text)
    run(root, "source", "prepare")
    report = json.loads((root / "data/card/report.json").read_text())
    assert report["left_out"] == {"excluded": len(planted)}
    assert report["pairs"]["train"] == len(train) - len(planted)
    write_data(root / "bad.jsonl", [{"id": "no id"}])
    assert "row 1 of bad.jsonl has no `id` of a pair" in refusal(root, "source")
