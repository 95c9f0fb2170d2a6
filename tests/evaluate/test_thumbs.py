"""The stages on thumbs: a small model on a quantized base learns from unpaired rows which answers are kind.

Every stage that loads the base quantizes it alike: tests/models/test_quantization.py has the same on pairs.
"""

import json
import shutil
from pathlib import Path

import pytest

from tasks.system.files import read_json
from tests.prepare.test_unpaired import thumbs
from tests.support.workspaces import make_workspace, run, write_data

# Its parts: tests/prepare/test_unpaired.py, tests/train/test_kto.py, tests/models/test_quantization.py.
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
STAGES = ("source", "prepare", "reference", "train", "evaluate", "export", "promote")


@pytest.fixture(scope="module")
def learnt(tiny_base: Path, mlflow_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    options = {"train.loss": {"kto": 1.0}, "train.beta": 0.1, "train.learning_rate": 3.0e-3, "train.epochs": 2}
    options |= dict.fromkeys(("train.quantization", "reference.quantization"), "nf4")
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
    for name in ("loss", "rewards/chosen", "rewards/margins", "rewards/accuracies"):
        assert trained[f"eval/{name}"] == pytest.approx(metrics[name], rel=1e-3, abs=1e-3), name
    assert metrics["length_bias"].keys() == {"correlation"}
    reasons = read_json(workspace / "data/metrics/promote.json")["reasons"]
    assert not any("rewards/" in reason for reason in reasons)
    assert "unpaired rows" in output
    assert "evaluated: the mean KL of next tokens is" in output  # of the exported weights to those on the nf4 base
    assert 0 < read_json(workspace / "data/model/manifest.json")["checks"]["quantized_policy"]["kl"] < 1


def test_each_row_is_listed_with_its_own_answer_alone(learnt: tuple[Path, str]) -> None:
    lines = [json.loads(line) for line in (learnt[0] / "data/metrics/pairs.jsonl").read_text().splitlines()]
    for line in lines:
        assert ("chosen" in line, "rejected" in line) == (line["sign"] > 0, line["sign"] < 0)
    assert "rates the answer as its label" in (learnt[0] / "data/model/README.md").read_text()
