"""The stages as Python functions, for notebooks and scripts: `prepare`, `train`, `evaluate` and `export` on a folder.

The folder holds what a checkout holds for the command `dpo`: params.yaml, infra/cluster.yaml, data/, and the runs in
MLflow's format below .mlflow. Each stage runs in a process of its own and prints its progress here.
"""

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from tasks.checkout import child_environment
from tasks.cluster import kept_ray
from tasks.config.addresses import as_path
from tasks.config.cluster import CLUSTER, Cluster
from tasks.config.params import PARAMS, Params, load_params, overlay, read_recipe
from tasks.config.paths import CARD, METRICS, MODEL, ROOT
from tasks.config.strict import dotted, read_yaml, validate
from tasks.config.train import with_whole_loss
from tasks.errors import UserError
from tasks.system import processes
from tasks.system.files import fingerprint, read_json, read_json_lines, write_text
from tasks.tracking import results


def prepare(
    folder: str | Path,
    data: str,
    model: str,
    *,
    recipe: str | None = None,
    params: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fetch data and model, and make tokenized pairs of the rows. Returns the data card's figures.

    `data` and `model` are what `source.data` and `source.model` take. `params` and `cluster` change values by their
    dotted names, {"train.beta": 0.2}, after those of the recipe (flows/recipes).
    """
    root = Path(folder).resolve()
    changes = {**(params or {}), "source.data": data, "source.model": model}
    changes = {key: _absolute(key, value) for key, value in changes.items()}
    _write(root / PARAMS, Params, ROOT / PARAMS, changes, recipe)
    _write(root / CLUSTER, Cluster, ROOT / CLUSTER, cluster or {}, recipe)
    _run(root, "source", "sample", "prepare")
    return read_json(root / CARD / "report.json")


def train(folder: str | Path, params: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Compute the reference's log-probabilities and train the policy; before them SFT, if `sft` is set.

    Returns the last value of each metric; `curves` returns all of them. Values in `params` stay for later calls. What
    an earlier call has computed for the same inputs is used again: reference values, and checkpoints of a training.
    """
    root = _prepared(folder)
    if params:
        _write(root / PARAMS, Params, root / PARAMS, params)
    _run(root, "sft", "reference", "train")
    return read_json(root / METRICS / "train.json")


def evaluate(folder: str | Path) -> dict[str, Any]:
    """Evaluate the policy on held-out pairs, and sample answers of policy and base model. Returns the metrics."""
    root = _prepared(folder)
    _run(root, "evaluate")
    return read_json(root / METRICS / "evaluate.json")


def export(folder: str | Path) -> Path:
    """Merge the adapter and write a standalone model; the path of its folder, for `from_pretrained`."""
    root = _prepared(folder)
    _run(root, "export")
    return root / MODEL


def curves(folder: str | Path) -> dict[int, dict[str, float]]:
    """The metrics of each logged training step, by step."""
    return results.curves(Path(folder))


def samples(folder: str | Path) -> list[dict[str, Any]]:
    """The sampled answers of base model and policy, a dict per prompt."""
    return read_json_lines(Path(folder) / METRICS / "samples.jsonl")


def _write(
    path: Path, model: type[BaseModel], base: Path, changes: Mapping[str, Any], recipe: str | None = None
) -> None:
    """Write a configuration file: `base`, the recipe over it, and the changes over both."""
    content = read_yaml(base)
    if recipe:
        content = overlay(content, read_recipe(recipe, path.stem), model)
    content = overlay(content, dotted(with_whole_loss(changes, content)), model)
    validate(model, content, path)
    write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _absolute(key: str, value: Any) -> Any:
    """An address of `source` that is a path, made absolute: the stages run in another folder than the caller."""
    if not key.startswith("source.") or not isinstance(value, str) or value == "demo":
        return value
    path = as_path(value)
    return str(path.resolve()) if path.exists() else value


def _prepared(folder: str | Path) -> Path:
    root = Path(folder).resolve()
    if not (root / CARD / "report.json").exists():
        raise UserError(f"{folder} has no prepared data. Call prepare(folder, data, model) first.")
    return root


def _run(root: Path, *stages: str) -> None:
    """Run stages one after the other; UserError with the stage's own message if one fails."""
    params = load_params(root / PARAMS)
    run = f"{root.name}-{fingerprint(params.model_dump())[:8]}"  # in MLflow
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = child_environment(run, root, PYTHONPATH=python_path, PYTHONUNBUFFERED="1")
    with kept_ray.keep_if_needed(root, env, stages, stages) as session:
        for stage in stages:
            command, error = [sys.executable, "-m", "tasks", stage], list[str]()
            if code := processes.run(command, root, {**env, **kept_ray.variables(session)}, partial(_print, error)):
                failure = f"The stage {stage} failed with exit code {code}; its output is above."
                raise UserError("\n".join(error) if code == 2 and error else failure)


def _print(error: list[str], line: str) -> None:
    """Print a line of a stage's output; the lines of its error message are collected for the exception instead."""
    if error or line.startswith("error: "):
        error.append(line.removeprefix("error: "))
    else:
        print(line, flush=True)
