"""The stage sample: pairs from answers of the start model, resumable, and the same from any number of workers."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tasks.artifacts import demo
from tasks.artifacts.pairs import read_rows
from tasks.config.params import Params, overlay
from tasks.config.strict import dotted, read_yaml, validate
from tasks.errors import UserError
from tasks.prepare.rows.preference import is_held_out, prompt_hash
from tasks.runs import dvc_lock
from tasks.sample.prompts import Prompt
from tasks.sample.stage import _compared, _pairs, _usable
from tests.evaluate.test_judges import classifier, server  # noqa: F401 (a fixture)
from tests.support.workspaces import PROJECT, make_workspace, run, start, wait_for, write_cluster

SETTINGS = {"prompts": 60, "answers": 3, "max_new_tokens": 32}


def make_params(**changes: Any) -> Params:
    content = overlay(read_yaml(PROJECT / "params.yaml"), dotted(changes))
    return validate(Params, content, Path("params.yaml"))


def section(**changes: Any) -> Any:
    return make_params(sample=changes).sample


def test_best_against_worst_or_every_pair_with_the_margin() -> None:
    answers, scores = ["a", "b", "c"], [1.0, 3.0, 1.5]
    assert _pairs(answers, scores, section()) == [(("b", 3.0), ("a", 1.0))]
    assert _pairs(answers, scores, section(min_margin=2.5)) == []
    every = _pairs(answers, scores, section(pairs="all", min_margin=1.0))
    assert [(better, worse) for (better, _), (worse, _) in every] == [("b", "c"), ("b", "a")]
    assert _pairs([], [], section()) == _pairs(["a", "b"], [2.0, 2.0], section()) == []


def test_only_different_and_finished_answers_are_used() -> None:
    drawn = [("yes", True), ("cut of", False), ("yes", True), (" ", True), ("no", True)]
    assert _usable(drawn) == ["yes", "no"]


def test_a_judge_of_pairs_ranks_by_the_share_of_answers_that_one_beats(
    server: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "infra").mkdir()
    write_cluster(tmp_path, {})
    judge = {"url": server.url, "model": "m", "key_variable": None, "requests_per_minute": 1e6}
    settings = section(judge="endpoint", endpoint=judge).as_evaluate(make_params().evaluate)
    prompt = Prompt([], "Which?", [1], None)
    scores = _compared(settings.endpoint, [prompt, prompt], [["worse", "the better one", "bad"], ["alone"]])
    assert scores == [[0.25, 1.0, 0.25], [0.0]]


def test_settings_that_cannot_work_are_refused() -> None:
    for changes, sentence in (
        ({"sample": {}, "source.data": "rows.jsonl"}, "`sample` needs a judge"),
        ({"sample": {}, "sft": {"learning_rate": 1.0e-4}}, "set one of them to null"),
        ({"sample": {"judge": "reward"}}, "judge reward needs `reward_model`"),
        ({"sample": {"judge": "demo"}, "source.data": "rows.jsonl"}, "knows the answers to the demo's questions only"),
        ({"sample": {"answers": 1}}, "`sample.answers`"),
    ):
        with pytest.raises(UserError, match=sentence):
            make_params(**changes)
    assert dvc_lock.is_disabled("sample", {"sample": None})
    assert not dvc_lock.is_disabled("sample", {"sample": {}})


def workspace(root: Path, model: Path, store: Path) -> Path:
    """Judged by a reward model with a random head: a barely trained model has no answer that the demo's judge likes."""
    judge = {"judge": "reward", "reward_model": {"model": str(classifier(root / "judge", model, 1)), "label": None}}
    shutil.copytree(store, root / ".mlflow")
    return make_workspace(root, model, **{"sample": {**SETTINGS, **judge, "keep_source": False}, "source.data": "demo"})


def stored(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.glob(".scratch/sample/*/answers/*.json")}


def pairs(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "data/sample/pairs.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_sampled_pairs_replace_the_training_pairs_and_a_kill_or_two_workers_change_none(
    tiny_base: Path, mlflow_store: Path, tmp_path: Path
) -> None:
    root = workspace(tmp_path / "work", tiny_base, mlflow_store)
    said = run(root, "source", "sample", "prepare")
    assert "sample: 180/180 answers" in said
    assert "180 answers computed" in said
    made = pairs(root)
    assert all(pair["score_chosen"] > pair["score_rejected"] for pair in made)
    train, held_out = (read_rows(root / f"data/pairs/{split}.arrow") for split in ("train", "eval"))
    assert {row["source"] for row in train} == {"sample"}
    assert len(train) == len(made) > 25
    margins = [pair["score_chosen"] - pair["score_rejected"] for pair in made]
    assert sorted(row["margin"] for row in train) == pytest.approx(sorted(margins), abs=1e-6)
    expected = {row["prompt"] for row in demo.rows(0) if is_held_out(prompt_hash(row["prompt"]), 0.2)}
    assert {row["prompt"] for row in held_out} == expected  # as without sampling
    # A killed stage continues with what it has drawn, here with two workers.
    killed = Path(shutil.copytree(root, tmp_path / "killed"))
    shutil.rmtree(killed / ".scratch/sample")
    shutil.rmtree(killed / "data/sample")
    process = start(killed, "sample")
    wait_for(lambda: stored(killed) or process.poll() is not None, 120, pause=0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = stored(killed)
    kept = sum(len(json.loads(path.read_text())) for path in before)
    assert 0 < kept < 180
    write_cluster(killed, {"inference.num_workers": 2})
    assert f"({180 - kept} answers computed" in run(killed, "sample")
    assert before.items() <= stored(killed).items()  # nothing was drawn twice
    assert pairs(killed) == made
    # Another judge, margin or rule reads the same answers; more answers draw only the new ones.
    change(root, "answers: 3", "answers: 4")
    change(root, "keep_source: false", "keep_source: true")
    before = stored(root)
    assert "(60 answers computed" in run(root, "sample", "prepare")
    assert before.items() <= stored(root).items()
    assert {row["source"] for row in read_rows(root / "data/pairs/train.arrow")} == {"demo", "sample"}


def change(root: Path, old: str, new: str) -> None:
    """A value in params.yaml."""
    text = (root / "params.yaml").read_text()
    assert old in text
    (root / "params.yaml").write_text(text.replace(old, new))


@pytest.mark.slow
def test_the_stage_is_silent_when_it_is_off(tiny_base: Path, tmp_path: Path) -> None:
    root = make_workspace(tmp_path / "work", tiny_base)
    assert run(root, "sample") == "sample: off\n"
    assert json.loads((root / "data/sample/manifest.json").read_text()) == {}
    assert not list(root.glob(".scratch/runs/*/sample.jsonl"))
