"""Trainings whose ranks share the tokens of a row: losses, metrics and weights of one rank, in every mode."""

import csv
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from transformers import MixtralConfig

from tests.support.engine import (
    AOT,
    HEADS,
    LORA,
    SAVE,
    SAVED_STEP,
    SHAPE,
    TRAINED,
    make_model,
    make_pairs,
    run_ranks,
    save,
    settings,
)
from tests.support.workspaces import run, write_cluster
from training.pairs.pair import Pair

pytestmark = pytest.mark.slow
KTO = ({"kto": {"weight": 1.0, "desirable_weight": 1.5, "undesirable_weight": 0.75}}, {"beta": 0.5})
SPEED = ("tokens_per_second", "pairs_per_second")
RUNS: dict[str, dict[str, Any]] = {
    "full": {"save_steps": SAVE},
    "lora": {"adapter": LORA, "activation_checkpointing": True},
    "aot": {"objective": AOT, "row_tokens": 16},
    "kto": {"objective": KTO},
    "moving": {"reference_update": {"every": 2, "alpha": 0.6}},
    "experts": {"router_aux_loss_coef": 2.0, "max_steps": 3},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    dense = make_model(tmp_path_factory.mktemp("dense"))
    experts = save(tmp_path_factory.mktemp("experts"), MixtralConfig(**SHAPE, **HEADS, num_local_experts=4))
    return {name: experts if name == "experts" else dense for name in RUNS}


@pytest.fixture(scope="module")
def pairs(models) -> dict[str, list[Pair]]:
    rng, made = random.Random(5), {folder: make_pairs(folder, TRAINED) for folder in set(models.values())}
    thumbs = [replace(pair, sign=rng.choice([1.0, 1.0, -1.0])) for pair in made[models["kto"]]]
    return {name: thumbs if name == "kto" else made[models[name]] for name in RUNS}


@pytest.fixture(scope="module")
def logs(tmp_path_factory, models, pairs) -> Callable[[str], tuple[Path, list[dict]]]:
    """The folder of a run and its log, by `RANKS-SHARED NAME`: one rank, two that share rows, and two groups of two.

    Runs of a number of ranks are made together, when the first of them is needed.
    """
    root, found = tmp_path_factory.mktemp("runs"), {}

    def add(ranks: int, *plan: tuple[str, int, dict[str, Any]], resumed: str | None = None) -> None:
        folder = root / str(ranks)
        folder.mkdir()
        made = [
            settings(folder, models[name], f"{ranks}-{shared} {name}", pairs[name], **RUNS[name] | changes)
            | {"sequence_parallel": shared}
            for name, shared, changes in plan
        ]
        if resumed:  # from a checkpoint of a training with other ranks
            name = f"{ranks}-2 resumed"
            made.append(settings(folder, models["full"], name, pairs["full"]) | {"sequence_parallel": 2})
            shutil.copytree(log(resumed)[0] / SAVED_STEP, folder / name / SAVED_STEP)
        logs = run_ranks(folder, ranks, made)
        found.update({name: (folder / name, log) for name, log in logs.items()})

    def log(name: str) -> tuple[Path, list[dict]]:
        if name not in found:
            MAKE[name[0]](add)
        return found[name]

    return log


MAKE: dict[str, Callable[[Callable[..., None]], None]] = {
    "1": lambda add: add(1, *((name, 1, {}) for name in RUNS)),
    "2": lambda add: add(2, *((name, 2, {}) for name in RUNS), resumed="1-1 full"),
    "4": lambda add: add(
        4, ("full", 4, {"zero_stage": 3}), ("lora", 2, {"zero_stage": 1}), ("aot", 2, {}), resumed="2-2 full"
    ),
}
# Groups of ranks, several of them, are those of test_tensor_parallel_training.py too.
GROUPS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("4-4 full", "4-2 lora", "4-2 aot")]


@pytest.mark.parametrize("name", [*(f"2-2 {name}" for name in RUNS), *GROUPS])
def test_a_training_with_shared_rows_follows_that_of_one_rank(logs, name):
    (folder, log), (one_folder, expected) = logs(name), logs(f"1-1 {name.split()[1]}")
    assert_same_course(log, [line for line in expected if "step" in line])
    file = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    found, weights = (load_file(path / "policy" / file) for path in (folder, one_folder))
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        assert (found[key] - value).abs().max() < 1e-4, key


@pytest.mark.parametrize("name", ["2-2 resumed", pytest.param("4-2 resumed", marks=pytest.mark.exhaustive)])
def test_a_training_resumes_with_other_ranks_and_another_share(logs, name):
    log, expected = logs(name)[1], logs("1-1 full")[1]
    assert_same_course(log, [line for line in expected if line.get("step", 0) > SAVE])


def assert_same_course(log: list[dict], expected: list[dict]) -> None:
    lines = [line for line in log if "step" in line]
    assert [line["step"] for line in lines] == [line["step"] for line in expected] != []
    for line, values in zip(lines, expected, strict=True):
        assert line.keys() == values.keys()
        # Before the first update all margins are 0 but for rounding, which decides their signs.
        undecided = {"rewards/accuracies"} if line["step"] == 1 else set()
        for metric in values.keys() - {*SPEED} - undecided:
            assert line[metric] == pytest.approx(values[metric], rel=1e-4, abs=2e-5), (line["step"], metric)


@pytest.mark.exhaustive  # the stage passes its settings on as it does all others
@pytest.mark.parametrize(
    ("option", "said"), [("sequence_parallel", "2 share each row"), ("tensor_parallel", "2 share each layer")]
)
def test_the_stage_with_two_workers_that_share_rows_or_layers_gives_the_result_of_one(
    tmp_path, referenced, option, said
):
    workspace = Path(shutil.copytree(referenced, tmp_path / "work"))
    params = yaml.safe_load((workspace / "params.yaml").read_text())
    params["train"]["max_steps"] = 3
    (workspace / "params.yaml").write_text(yaml.safe_dump(params))
    write_cluster(workspace, {"actor_train.num_workers": 1})
    run(workspace, "train")
    course, weights = results(workspace)
    assert len(course) > 1
    shutil.rmtree(workspace / ".scratch" / "train")  # or the training would resume, finished
    write_cluster(workspace, {"actor_train.num_workers": 2, f"actor_train.{option}": 2})
    assert f"2 workers ({said})" in run(workspace, "train")
    found, shared = results(workspace)
    for line, values in zip(found, course, strict=True):
        assert line == pytest.approx(values, rel=1e-3, abs=1e-4)
    assert weights.keys() == shared.keys()
    assert max((shared[name] - weights[name]).abs().max().item() for name in weights) < 1e-4


def results(workspace: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The curves of a training and its adapter."""
    with (workspace / "data" / "metrics" / "train.csv").open() as file:
        course = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    del course[0]["rewards/accuracies"]  # of ties: policy and reference differ by rounding alone
    return course, load_file(workspace / "data" / "policy" / "adapter_model.safetensors")
