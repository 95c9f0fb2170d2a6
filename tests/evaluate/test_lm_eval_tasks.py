"""lm-evaluation-harness is optional: a missing package is a user error; an installed one scores a task of our own."""

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.config.cluster import load_cluster
from tasks.config.evaluate import Evaluate
from tasks.config.names import HARNESS_PRESETS
from tasks.config.params import overlay
from tasks.config.strict import dotted, read_yaml
from tasks.errors import UserError
from tasks.evaluate import evaluator
from tasks.evaluate.sampler import Weights
from tasks.evaluate.scoring import evaluator_pool
from tasks.evaluate.stage import _harness
from training.evaluation import lm_eval_tasks

ROOT = Path(__file__).resolve().parents[2]
TASK = """\
task: cups
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


def params(harness: dict) -> Evaluate:
    content = overlay(read_yaml(ROOT / "params.yaml"), dotted({"evaluate.harness": harness}))
    return Evaluate.model_validate(content["evaluate"])


def measured(harness: dict, model: Path) -> dict[str, dict[str, float]]:
    weights = Weights(model, model, "float32")
    with evaluator_pool(load_cluster(ROOT), "evaluate") as workers:
        return _harness(params(harness), workers, weights, weights)


def listed() -> set[str]:
    """The tasks, groups and tags that the harness's files define, without the index that takes it fifteen seconds."""
    package = find_spec("lm_eval")
    assert package
    assert package.origin
    files = Path(package.origin).parent.glob("tasks/**/*.yaml")
    text = "\n".join(path.read_text(errors="replace") for path in files)
    tags = "".join(re.findall(r"^tag: *\n((?: *- .*\n)+)", text, re.MULTILINE))
    names = re.findall(r"^(?:task|group|tag): *(\S+) *$", text, re.MULTILINE)
    return {*names, *re.findall(r"- (\S+)", tags)}


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(listed, id="files"),
        pytest.param(lambda: set(lm_eval_tasks.task_index(None).all_tasks), id="index", marks=pytest.mark.exhaustive),
    ],
)
def test_presets_stand_for_tasks_that_the_harness_has(known: Callable[[], set[str]]):
    expanded = params({"tasks": [*HARNESS_PRESETS, "piqa"], "limit": 1, "folder": None})
    every = {"piqa", *(task for preset in HARNESS_PRESETS.values() for task in preset)}
    assert set(expanded.harness.task_names()) == every
    assert not every - (found := known())
    assert not HARNESS_PRESETS.keys() & found  # a preset hides no task


def test_a_missing_lm_eval_is_a_user_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluator, "find_spec", lambda name: None)  # `make test` installs it
    with pytest.raises(UserError, match=r"not installed. Run `.venv/bin/pip install lm_eval`"):
        measured({"tasks": ["arc_easy"], "limit": None, "folder": None}, ROOT)


@pytest.mark.slow
def test_a_harness_task_is_scored_for_both_models(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"question": "The cup is under the", "choices": [" bed", " zzqx"], "answer": 0}] * 4
    (tmp_path / "cups.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "cups.yaml").write_text(TASK.replace("FILE", str(tmp_path / "cups.jsonl")))
    found = measured({"tasks": ["cups"], "limit": 3, "folder": str(tmp_path)}, tiny_base)
    assert found == {"base": {"cups/acc": 1.0}, "policy": {"cups/acc": 1.0}}
    index = lm_eval_tasks.task_index
    monkeypatch.setattr(lm_eval_tasks, "task_index", lambda folder, has_defaults=False: index(folder, False))
    with pytest.raises(UserError, match="has no task nothing"):
        measured({"tasks": ["nothing"], "limit": 3, "folder": str(tmp_path)}, tiny_base)
