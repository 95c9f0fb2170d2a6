"""The stages on thumbs: a small model learns from unpaired rows which answers are kind, and the gate sees it."""

import json
import shutil
from pathlib import Path

import pytest

from tasks.system.files import read_json
from tests.dataset.test_unpaired import thumbs
from tests.support.workspaces import make_workspace, run, write_data

pytestmark = pytest.mark.slow
STAGES = ("source", "prepare", "reference", "train", "evaluate", "export", "promote")


@pytest.fixture(scope="module")
def learnt(tiny_base: Path, mlflow_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    options = {"train.loss": {"kto": 1.0}, "train.beta": 0.1, "train.learning_rate": 3.0e-3, "train.epochs": 2}
    gate = {"promote.require": {"rewards/accuracies": 0.5, "rewards/auc": 0.5}}
    root, cluster = tmp_path_factory.mktemp("thumbs") / "workspace", {"actor_train.save_steps": 100}
    workspace = make_workspace(root, tiny_base, cluster=cluster, **options, **gate)
    shutil.copytree(mlflow_store, workspace / ".mlflow")
    write_data(workspace / "pairs.jsonl", thumbs(150))
    return workspace, run(workspace, *STAGES)


def test_the_policy_tells_desirable_from_undesirable_answers(learnt: tuple[Path, str]) -> None:
    workspace, output = learnt
    metrics, trained = (read_json(workspace / f"data/metrics/{name}.json") for name in ("evaluate", "train"))
    assert metrics["rewards/accuracies"] > 0.7
    assert metrics["rewards/auc"] > 0.9
    assert metrics["intervals"]["rewards/auc"]["low"] <= metrics["rewards/auc"]
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])
    low, high = (metrics["intervals"]["rewards/margins"][end] for end in ("low", "high"))
    assert low <= metrics["rewards/margins"] <= high
    assert trained["eval/rewards/chosen"] == pytest.approx(metrics["rewards/chosen"], abs=1e-4)
    assert trained["eval/rewards/accuracies"] == pytest.approx(metrics["rewards/accuracies"])
    assert metrics["length_bias"].keys() == {"correlation"}
    reasons = read_json(workspace / "data/metrics/promote.json")["reasons"]
    assert not any("rewards/" in reason for reason in reasons)
    assert "unpaired rows" in output


def test_each_row_is_listed_with_its_own_answer_alone(learnt: tuple[Path, str]) -> None:
    lines = [json.loads(line) for line in (learnt[0] / "data/metrics/pairs.jsonl").read_text().splitlines()]
    for line in lines:
        assert ("chosen" in line, "rejected" in line) == (line["sign"] > 0, line["sign"] < 0)
    assert "rates the answer as its label" in (learnt[0] / "data/model/README.md").read_text()
