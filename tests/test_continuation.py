"""Continue a training: from its own checkpoint, from another one's, and what is said about the difference."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tasks import continuation, train
from tasks.errors import UserError
from tasks.files import hash_files
from tasks.params import load_params
from tests import test_engine
from tests.settings import KEY
from tests.test_checkpoint import make_checkpoint
from tests.test_engine import LORA, run_ranks, settings
from tests.workspaces import make_workspace
from training import checkpoint

model, pairs = test_engine.model, test_engine.pairs  # fixtures
PROJECT = Path(__file__).resolve().parents[1]
CONSTANT = {"schedule": "constant", "warmup_fraction": 0.0}
FULL = {"adapter": None, "zero_stage": 1}
RUINOUS = {**FULL, "learning_rate": 0.3, "eval_steps": 1, "select": "eval/loss"}  # the first evaluations are the best


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model, pairs) -> dict[str, Any]:
    """22 pairs in batches of 6: 4 steps an epoch."""
    folder = tmp_path_factory.mktemp("continued")

    def one(name: str, **changes: Any) -> dict[str, Any]:
        return settings(folder, model, name, pairs, **{"adapter": LORA, **CONSTANT, **changes})

    four, full = (str(folder / name / "step-00000004") for name in ("four", "full-four"))
    patient = one("patient", **RUINOUS, patience=2)
    made = [
        one("four", max_steps=4),
        one("eight", max_steps=8),
        one("extended", max_steps=8, start=four),
        one("decayed", max_steps=8, start=four, weight_decay=0.5),
        one("clipped", max_steps=8, start=four, max_grad_norm=0.01),
        one("restaged", max_steps=8, start=four, zero_stage=1),
        one("full-four", max_steps=4, **FULL),
        one("full-eight", max_steps=8, **FULL),
        one("full-extended", max_steps=8, start=full, **FULL),
        one("kept", **RUINOUS, start=full),
        patient,
        {**patient, "name": "patient-again"},
        one("epochs", epochs=3, eval_steps="epoch"),
        one("ranked", **RUINOUS, keep_best=3, keep_checkpoints=1, save_steps=100),
        one("all", **RUINOUS, keep_best=3, keep_checkpoints=8, save_steps=1),
        one("resumed", **RUINOUS, keep_best=3, keep_checkpoints=1, killed={"run": str(folder / "all"), "after": 5}),
    ]
    return {"logs": run_ranks(folder, 1, made), "folder": folder}


def evaluations(log: list[dict]) -> dict[int, float]:
    return {line["step"]: line["eval/loss"] for line in log if "eval/loss" in line}


def course(log: list[dict]) -> list[dict]:
    """Logged steps from the fifth on, less what a clock says."""
    return [
        {name: value for name, value in line.items() if "per_second" not in name}
        for line in log
        if "loss" in line and line["step"] > 4
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", "full-"])
def test_a_finished_training_that_is_extended_ends_as_a_longer_one(runs, mode):
    """Bit for bit: the final checkpoint has all of the state, and a step's pairs depend on its number alone."""
    logs, folder = runs["logs"], runs["folder"]
    assert [line["step"] for line in logs[f"{mode}extended"] if "loss" in line] == [5, 6, 7, 8]
    assert course(logs[f"{mode}extended"]) == course(logs[f"{mode}eight"])
    extended = hash_files(folder / f"{mode}extended" / "policy")
    assert extended == hash_files(folder / f"{mode}eight" / "policy")
    assert extended != hash_files(folder / f"{mode}four" / "policy")


@pytest.mark.slow
def test_a_continued_training_has_its_own_options_and_not_the_checkpoints(runs):
    """DeepSpeed loads the weight decay and the limit of the gradient norm with the optimizer."""
    extended = course(runs["logs"]["extended"])
    for name in ("decayed", "clipped"):
        changed = course(runs["logs"][name])
        assert changed[0]["loss"] == extended[0]["loss"], name  # of the weights as loaded
        assert changed[3]["loss"] != extended[3]["loss"], name


@pytest.mark.slow
def test_another_zero_stage_continues_within_rounding(runs):
    losses = [[line["loss"] for line in course(runs["logs"][name])] for name in ("restaged", "eight")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert not list((runs["folder"] / "restaged").rglob(".universal*"))


@pytest.mark.slow
def test_the_policy_that_a_training_starts_with_may_stay_the_best(runs):
    seen = evaluations(runs["logs"]["kept"])
    assert list(seen) == [4, 5, 6, 7, 8]
    assert min(seen, key=seen.__getitem__) == 4
    assert hash_files(runs["folder"] / "kept" / "policy") == hash_files(runs["folder"] / "full-four" / "policy")


@pytest.mark.slow
def test_a_training_that_stopped_early_stays_stopped(runs):
    logs = runs["logs"]
    last = max(evaluations(logs["patient"]))
    assert last < 8
    assert [line["step"] for line in logs["patient-again"] if "loss" in line] == []
    assert evaluations(logs["patient-again"]) == {last: pytest.approx(evaluations(logs["patient"])[last])}


@pytest.mark.slow
def test_held_out_pairs_are_evaluated_at_the_end_of_each_epoch(runs):
    assert list(evaluations(runs["logs"]["epochs"])) == [4, 8, 12]
    assert list(evaluations(runs["logs"]["eight"])) == [8]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ranked", "resumed"])
def test_the_best_checkpoints_stay_beside_the_newest(runs, name):
    """`resumed` was killed after step 5 and remembers what was best before."""
    folder = runs["folder"] / name
    seen = evaluations(runs["logs"]["ranked"])
    best = sorted(seen, key=seen.__getitem__)[:3]
    assert min(best) < 5
    assert {path.name for path in folder.glob("step-*")} == {f"step-{step:08d}" for step in (*best, 8)}
    for step in best:
        path = folder / f"step-{step:08d}"
        assert continuation.resolve(str(path), folder, KEY) == path
    ranking = ", ".join(f"step {step} ({seen[step]:.4g})" for step in best)
    assert {"said": f"checkpoints kept by eval/loss: {ranking}"} in runs["logs"][name]


@pytest.fixture
def origin() -> dict[str, Any]:
    section = load_params(PROJECT / "params.yaml").train.model_dump()
    code = {"training/loop.py": "1", "training/losses.py": "2"}
    return {
        "run": "first",
        "train": section,
        "steps": 62,
        "base": "b",
        "pairs": "p",
        "reference": "r",
        "code": code,
        "start": None,
    }


def changed(origin: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Dots in names of `train` are underscores here: train__epochs."""
    new = deepcopy(origin)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            new[section][key] = value
        else:
            new[section] = value
    return new


@pytest.mark.parametrize(
    "changes",
    [
        {"train__logging_steps": 1},
        {"train__eval_steps": 7},
        {"train__kl_limit": 3.0},
        {"train__max_skipped_steps": 9},
        {"train__resume_from_checkpoint": "never"},
        {"train__epochs": 2, "train__max_steps": 62},
        {"run": "second"},
    ],
)
def test_what_cannot_change_the_weights_keeps_the_checkpoints(origin, changes):
    assert continuation.address(changed(origin, **changes)) == continuation.address(origin)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {"steps": 124}),
        ({}, {"train__beta": 0.2}),
        ({}, {"train__select": "eval/loss"}),
        ({}, {"pairs": "q"}),
        ({}, {"code": {"training/loop.py": "9", "training/losses.py": "2"}}),
        ({}, {"start": "c"}),
        ({"train__select": "eval/loss"}, {"train__eval_steps": 7}),
        ({"train__stop_on_alarm": True}, {"train__logging_steps": 1}),
        ({"train__stop_on_alarm": True}, {"train__kl_limit": 3.0}),
    ],
)
def test_what_changes_the_weights_is_another_training(origin, given, changes):
    before = changed(origin, **given)
    assert continuation.address(changed(before, **changes)) != continuation.address(before)


def save(folder: Path, step: int, origin: dict[str, Any]) -> Path:
    """A whole checkpoint, but for DeepSpeed's own files."""
    checkpoint.claim(folder, "mine")
    make_checkpoint(folder, step, keep=9, state={"step": step, "origin": origin})
    return folder / f"step-{step:08d}"


def test_a_checkpoint_is_named_by_its_folder_its_trainings_or_its_run(tmp_path, origin):
    runs, training = tmp_path / "runs", tmp_path / "train" / "abc"
    first, last = (save(training, step, origin) for step in (20, 62))
    (runs / "first").mkdir(parents=True)
    (runs / "first" / continuation.TRAINING).write_text(str(training))
    assert continuation.resolve(str(first), runs, KEY) == first
    assert continuation.resolve(str(training), runs, KEY) == last
    assert continuation.resolve("first", runs, KEY) == last
    with pytest.raises(
        UserError, match=r"train.resume_from_checkpoint is 'second', and .*a run that trained \(first\)"
    ):
        continuation.resolve("second", runs, KEY)
    (last / "state" / "rank0.pt").write_bytes(b"")
    assert continuation.resolve("first", runs, KEY) == first
    with pytest.raises(UserError, match=r"cannot be used: state/rank0.pt has changed"):
        continuation.resolve(str(last), runs, KEY)
    shutil.rmtree(first)
    with pytest.raises(UserError, match="there is no whole checkpoint in"):
        continuation.resolve("first", runs, KEY)


def test_what_differs_from_the_other_training_is_said(tmp_path, origin):
    path = save(tmp_path, 62, origin)
    longer = changed(origin, train__epochs=2, steps=124, run="second")
    continuation.check(path, longer)
    assert continuation.continued(path, longer) == (
        "resuming from step 62 of run first: train.epochs 1 -> 2, "
        "the learning-rate schedule is recomputed over 124 steps"
    )
    constant = changed(longer, train__schedule="constant")
    assert continuation.continued(path, constant) == (
        'resuming from step 62 of run first: train.epochs 1 -> 2, train.schedule "cosine" -> "constant"'
    )
    code = {"training/loop.py": "9", "training/losses.py": "2"}
    other = changed(longer, pairs="q", reference="s", code=code, train__beta=0.2)
    assert continuation.continued(path, other) == (
        "resuming from step 62 of run first: train.beta 0.1 -> 0.2, train.epochs 1 -> 2, other pairs, "
        "other reference log-probabilities, code of training/loop.py, "
        "the learning-rate schedule is recomputed over 124 steps, "
        "steps from 63 on take other pairs than they would have"
    )
    logs = changed(origin, train__logging_steps=1)
    assert continuation.resumed(path, logs) == (
        "resuming from the checkpoint of step 62; from there on train.logging_steps 5 -> 1"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"base": "c"}, "another base model"),
        ({"train__adapter": None}, "train.adapter"),
        ({"train__adapter": {"rank": 8, "alpha": 32}}, "train.adapter.rank 16 -> 8"),
        ({"train__dtype": "bfloat16"}, 'train.dtype "float32" -> "bfloat16"'),
        ({"steps": 62}, "is of step 62, and this training ends at step 62. Raise train.epochs or train.max_steps"),
    ],
)
def test_what_cannot_be_continued_is_refused_with_the_difference(tmp_path, origin, changes, sentence):
    path = save(tmp_path, 62, origin)
    with pytest.raises(UserError) as error:
        continuation.check(path, changed(origin, **{"steps": 124, **changes}))
    assert sentence in str(error.value)


def test_a_training_that_starts_from_step_0_names_the_one_that_could_be_continued(tmp_path, origin):
    assert continuation.other_training(tmp_path, origin) is None
    save(tmp_path / "far", 62, changed(origin, train__beta=0.5, train__learning_rate=1.0))
    near = save(tmp_path / "near", 62, changed(origin, train__beta=0.5))
    save(tmp_path / "unfit", 62, changed(origin, train__dtype="bfloat16"))
    save(tmp_path / "elsewhere", 62, changed(origin, pairs="q"))
    assert continuation.other_training(tmp_path, origin) == (
        f"starting from step 0. {near} has the same pairs and base model, but changed: train.beta 0.5 -> 0.1. "
        f"To continue from it, set train.resume_from_checkpoint: {near}"
    )


def test_a_training_begins_with_its_own_checkpoint_then_the_named_one_then_from_step_0(tmp_path, origin):
    path = save(tmp_path / "first", 20, origin)
    folder, now = tmp_path / "second", changed(origin, train__beta=0.5, start="c")
    assert train._discard(folder) == "starting from step 0"
    assert str(train._begin(folder, now, None, KEY)).startswith(f"starting from step 0. {path} has the same pairs")
    assert train._begin(folder, now, path, KEY) == "resuming from step 20 of run first: train.beta 0.1 -> 0.5"
    assert checkpoint.find_damage(folder / checkpoint.START / path.name, KEY) is None
    save(folder, 40, now)
    for start in (None, path):
        assert train._begin(folder, now, start, KEY) == "resuming from the checkpoint of step 40"
    assert train._discard(folder) == "starting from step 0; deleted this training's step-00000040"
    assert not folder.exists()


def test_checkpoints_are_ranked_only_where_evaluations_rank_them(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workspace(tmp_path / "work", tmp_path, cluster={"actor_train.keep_best": 2}))
    with pytest.raises(UserError, match=r"actor_train.keep_best ranks checkpoints by train.select"):
        train.train(None)


def test_an_adopted_checkpoint_survives_the_training_that_made_it(tmp_path, origin):
    path = save(tmp_path / "first", 62, origin)
    size = path / "state" / "rank0.pt"
    checkpoint.adopt(path, tmp_path / "second")
    (adopted,) = checkpoint.whole_checkpoints(tmp_path / "second" / checkpoint.START, KEY)
    assert size.stat().st_nlink == 2  # stored once
    digest = continuation.content_hash(path)
    shutil.rmtree(tmp_path / "first")
    assert checkpoint.find_damage(adopted, KEY) is None
    assert continuation.content_hash(adopted) == digest
    assert json.loads((adopted / "state.json").read_text())["origin"] == origin
