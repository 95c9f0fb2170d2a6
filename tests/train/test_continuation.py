"""Continue a training from its own checkpoint or another one's, and report what changed."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.system.files import hash_files
from tasks.train import continuation, driver
from tasks.train import stage as train
from tests.support import engine
from tests.support.engine import LORA, run_ranks, settings
from tests.support.settings import KEY
from tests.support.workspaces import make_workspace
from tests.train import test_engine
from tests.train.test_checkpoint import make_checkpoint
from training.pairs.pair import Pair
from training.trainer import checkpoint_files

model = test_engine.model  # a fixture
PROJECT = Path(__file__).resolve().parents[2]
CONSTANT = {"schedule": "constant", "warmup_fraction": 0.0}
FULL = {"adapter": None, "zero_stage": 1}
SHRINKING = {"learning_rate": 1e-4, "weight_decay": 1000.0}  # by a tenth a step; the gradients have little effect
RUINOUS = {**FULL, "learning_rate": 0.3, "eval_steps": 1, "select": "eval/loss"}  # the first evaluations are the best


@pytest.fixture(scope="module")
def pairs(model) -> list[Pair]:
    return engine.make_pairs(model)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model, pairs) -> dict[str, Any]:
    """22 pairs in batches of 6: 4 steps an epoch."""
    folder = tmp_path_factory.mktemp("continued")

    def case(name: str, **changes: Any) -> dict[str, Any]:
        return settings(folder, model, name, pairs, **{"adapter": LORA, **CONSTANT, **changes})

    four, full = (str(folder / name / "step-00000004") for name in ("four", "full-four"))
    patient = case("patient", **RUINOUS, patience=2)
    cases = [
        case("four", max_steps=4),
        case("eight", max_steps=8),
        case("extended", max_steps=8, start=four),
        case("decayed", max_steps=8, start=four, weight_decay=0.5),
        case("clipped", max_steps=8, start=four, max_grad_norm=0.01),
        case("restaged", max_steps=8, start=four, zero_stage=1),
        case("full-four", max_steps=4, **FULL),
        case("full-eight", max_steps=8, **FULL),
        case("full-extended", max_steps=8, start=full, **FULL),
        case("shrunk", max_steps=8, start=full, **FULL, **SHRINKING),
        case("shrunk-zero3", max_steps=4, **{**FULL, "zero_stage": 3}, **SHRINKING),
        case("kept", **RUINOUS, start=full),
        patient,
        {**patient, "name": "patient-again"},
        case("epochs", epochs=3, eval_steps="epoch"),
        case("ranked", **RUINOUS, keep_best=3, keep_checkpoints=1, save_steps=100),
        case("all", **RUINOUS, keep_best=3, keep_checkpoints=8, save_steps=1),
        case("resumed", **RUINOUS, keep_best=3, keep_checkpoints=1, killed={"run": str(folder / "all"), "after": 5}),
    ]
    return {"logs": run_ranks(folder, 1, cases), "folder": folder}


def evaluations(log: list[dict]) -> dict[int, float]:
    return {line["step"]: line["eval/loss"] for line in log if "eval/loss" in line}


def steps_after_4(log: list[dict]) -> list[dict]:
    """Logged steps from the fifth on, without speeds."""
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
    assert steps_after_4(logs[f"{mode}extended"]) == steps_after_4(logs[f"{mode}eight"])
    extended = hash_files(folder / f"{mode}extended" / "policy")
    assert extended == hash_files(folder / f"{mode}eight" / "policy")
    assert extended != hash_files(folder / f"{mode}four" / "policy")


@pytest.mark.slow
def test_a_continued_training_has_its_own_options_and_not_the_checkpoints(runs):
    """DeepSpeed loads the weight decay and the limit of the gradient norm with the optimizer."""
    extended = steps_after_4(runs["logs"]["extended"])
    for name in ("decayed", "clipped"):
        changed = steps_after_4(runs["logs"][name])
        assert changed[0]["loss"] == extended[0]["loss"], name  # of the weights as loaded
        assert changed[3]["loss"] != extended[3]["loss"], name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shrunk", "shrunk-zero3"])
def test_weight_decay_shrinks_matrices_and_not_norms_also_after_a_restart(runs, model, name):
    before, after = (load_file(folder / "model.safetensors") for folder in (model, runs["folder"] / name / "policy"))
    ratios = {key: (after[key].norm() / before[key].norm()).item() for key in after}
    assert all(0.6 < ratio < 0.75 for key, ratio in ratios.items() if after[key].dim() > 1)  # 0.9 ** 4
    assert {key: ratio for key, ratio in ratios.items() if after[key].dim() == 1 and abs(ratio - 1) > 0.05} == {}


@pytest.mark.slow
def test_another_zero_stage_continues_within_rounding(runs):
    losses = [[line["loss"] for line in steps_after_4(runs["logs"][name])] for name in ("restaged", "eight")]
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
        assert continuation.find_checkpoint(str(path), folder, KEY) == path
    ranking = ", ".join(f"step {step} ({seen[step]:.4g})" for step in best)
    assert {"said": f"checkpoints kept by eval/loss: {ranking}"} in runs["logs"][name]


@pytest.fixture
def origin() -> dict[str, Any]:
    section = load_params(PROJECT / "params.yaml").train.model_dump()
    code = {"training/trainer/loop.py": "1", "training/objectives/terms.py": "2"}
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
def test_options_without_effect_on_the_weights_keep_the_training_hash(origin, changes):
    assert continuation.training_hash(changed(origin, **changes)) == continuation.training_hash(origin)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {"steps": 124}),
        ({}, {"train__beta": 0.2}),
        ({}, {"train__select": "eval/loss"}),
        ({}, {"pairs": "q"}),
        ({}, {"code": {"training/trainer/loop.py": "9", "training/objectives/terms.py": "2"}}),
        ({}, {"start": "c"}),
        ({"train__select": "eval/loss"}, {"train__eval_steps": 7}),
        ({"train__stop_on_alarm": True}, {"train__logging_steps": 1}),
        ({"train__stop_on_alarm": True}, {"train__kl_limit": 3.0}),
    ],
)
def test_options_that_change_the_weights_change_the_training_hash(origin, options, changes):
    before = changed(origin, **options)
    assert continuation.training_hash(changed(before, **changes)) != continuation.training_hash(before)


def save(folder: Path, step: int, origin: dict[str, Any]) -> Path:
    """A whole checkpoint, but for DeepSpeed's own files."""
    checkpoint_files.claim(folder, "mine")
    make_checkpoint(folder, step, keep=9, state={"step": step, "origin": origin})
    return folder / f"step-{step:08d}"


def test_a_checkpoint_is_named_by_its_folder_its_trainings_or_its_run(tmp_path, origin):
    runs, training = tmp_path / "runs", tmp_path / "train" / "abc"
    first, last = (save(training, step, origin) for step in (20, 62))
    (runs / "first").mkdir(parents=True)
    (runs / "first" / continuation.TRAINING_FILE).write_text(str(training))
    assert continuation.find_checkpoint(str(first), runs, KEY) == first
    assert continuation.find_checkpoint(str(training), runs, KEY) == last
    assert continuation.find_checkpoint("first", runs, KEY) == last
    with pytest.raises(
        UserError, match=r"train.resume_from_checkpoint is 'second', but .*a run that trained \(first\)"
    ):
        continuation.find_checkpoint("second", runs, KEY)
    (last / "state" / "rank0.pt").write_bytes(b"")
    assert continuation.find_checkpoint("first", runs, KEY) == first
    with pytest.raises(UserError, match=r"cannot be used: state/rank0.pt has changed"):
        continuation.find_checkpoint(str(last), runs, KEY)
    shutil.rmtree(first)
    with pytest.raises(UserError, match="has no complete checkpoint"):
        continuation.find_checkpoint("first", runs, KEY)


def test_a_continued_training_reports_what_changed(tmp_path, origin):
    path = save(tmp_path, 62, origin)
    longer = changed(origin, train__epochs=2, steps=124, run="second")
    continuation.check_compatible(path, longer)
    assert continuation.describe_continuation(path, longer) == (
        "resuming from step 62 of run first: train.epochs 1 -> 2, "
        "the learning-rate schedule is recomputed over 124 steps"
    )
    constant = changed(longer, train__schedule="constant")
    assert continuation.describe_continuation(path, constant) == (
        'resuming from step 62 of run first: train.epochs 1 -> 2, train.schedule "cosine" -> "constant"'
    )
    code = {"training/trainer/loop.py": "9", "training/objectives/terms.py": "2"}
    other = changed(longer, pairs="q", reference="s", code=code, train__beta=0.2)
    assert continuation.describe_continuation(path, other) == (
        "resuming from step 62 of run first: train.beta 0.1 -> 0.2, train.epochs 1 -> 2, other pairs, "
        "other reference log-probabilities, code of training/trainer/loop.py, "
        "the learning-rate schedule is recomputed over 124 steps, "
        "from step 63 on, steps use other pairs than before"
    )
    logs = changed(origin, train__logging_steps=1)
    assert continuation.describe_resume(path, logs) == (
        "resuming from the checkpoint of step 62; changed: train.logging_steps 5 -> 1"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": "c"}, "another base model"),
        ({"train__adapter": None}, "train.adapter"),
        ({"train__adapter": {"rank": 8, "alpha": 32}}, "train.adapter.rank 16 -> 8"),
        ({"train__dtype": "bfloat16"}, 'train.dtype "float32" -> "bfloat16"'),
        ({"steps": 62}, "is of step 62, but this training ends at step 62. Raise train.epochs or train.max_steps"),
    ],
)
def test_an_incompatible_checkpoint_is_an_error_that_names_the_change(tmp_path, origin, changes, message):
    path = save(tmp_path, 62, origin)
    with pytest.raises(UserError) as error:
        continuation.check_compatible(path, changed(origin, **{"steps": 124, **changes}))
    assert message in str(error.value)


def test_a_training_from_step_0_names_a_checkpoint_that_it_could_continue(tmp_path, origin):
    assert continuation.suggest_checkpoint(tmp_path, origin) is None
    save(tmp_path / "far", 62, changed(origin, train__beta=0.5, train__learning_rate=1.0))
    near = save(tmp_path / "near", 62, changed(origin, train__beta=0.5))
    save(tmp_path / "unfit", 62, changed(origin, train__dtype="bfloat16"))
    save(tmp_path / "elsewhere", 62, changed(origin, pairs="q"))
    assert continuation.suggest_checkpoint(tmp_path, origin) == (
        f"starting from step 0. {near} has the same pairs and base model, but these changed: train.beta 0.5 -> 0.1. "
        f"To continue from it, set train.resume_from_checkpoint: {near}"
    )


def test_a_training_prefers_its_own_checkpoint_then_the_named_one_then_step_0(tmp_path, origin):
    path = save(tmp_path / "first", 20, origin)
    folder, now = tmp_path / "second", changed(origin, train__beta=0.5, start="c")
    assert driver._delete_checkpoints(folder) == "starting from step 0"
    assert str(driver._prepare_start(folder, now, None, KEY)).startswith(
        f"starting from step 0. {path} has the same pairs"
    )
    assert driver._prepare_start(folder, now, path, KEY) == "resuming from step 20 of run first: train.beta 0.1 -> 0.5"
    assert checkpoint_files.find_damage(folder / checkpoint_files.START / path.name, KEY) is None
    save(folder, 40, now)
    for start in (None, path):
        assert driver._prepare_start(folder, now, start, KEY) == "resuming from the checkpoint of step 40"
    assert driver._delete_checkpoints(folder) == "starting from step 0; deleted this training's step-00000040"
    assert not folder.exists()


def test_checkpoints_are_ranked_only_where_evaluations_rank_them(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workspace(tmp_path / "work", tmp_path, cluster={"actor_train.keep_best": 2}))
    with pytest.raises(UserError, match=r"actor_train.keep_best ranks checkpoints by train.select"):
        train.train(None)


@pytest.mark.parametrize("option", [{"init": "pissa"}, {"modules_to_save": ["embed_tokens"]}])
def test_adapters_that_read_whole_weights_are_refused_under_zero_3(tmp_path, monkeypatch, option):
    options = {f"train.adapter.{name}": value for name, value in option.items()}
    monkeypatch.chdir(make_workspace(tmp_path / "work", tmp_path, cluster={"actor_train.zero_stage": 3}, **options))
    with pytest.raises(UserError, match=r"Set it to 2, or train.adapter.init to zero and modules_to_save to \[\]"):
        train.train(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train.quantization": "fp8", "reference.quantization": "fp8"}, "cannot split a quantized base model"),
        ({"train.adapter.use_dora": True}, "splits the weights that adapter.use_dora needs whole"),
        (
            {"train.adapter.dropout": 0.1},
            "Set it to 1, or train.adapter.use_dora to false and train.adapter.dropout to 0",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_shared_layers(tmp_path, monkeypatch, options, message):
    cluster = {"actor_train.num_workers": 2, "actor_train.tensor_parallel": 2}
    monkeypatch.chdir(make_workspace(tmp_path / "work", tmp_path, cluster=cluster, **options))
    with pytest.raises(UserError, match=rf"actor_train.tensor_parallel 2.*{message}"):
        train.train(None)


def test_an_adopted_checkpoint_survives_the_training_that_made_it(tmp_path, origin):
    path = save(tmp_path / "first", 62, origin)
    size = path / "state" / "rank0.pt"
    checkpoint_files.adopt(path, tmp_path / "second")
    (adopted,) = checkpoint_files.whole_checkpoints(tmp_path / "second" / checkpoint_files.START, KEY)
    assert size.stat().st_nlink == 2  # stored once
    digest = continuation.checkpoint_hash(path)
    shutil.rmtree(tmp_path / "first")
    assert checkpoint_files.find_damage(adopted, KEY) is None
    assert continuation.checkpoint_hash(adopted) == digest
    assert json.loads((adopted / "state.json").read_text())["origin"] == origin
