"""Which checkpoint a training continues from, and what changed since the training that saved it.

A training's origin is everything that determines it, as plain JSON. Its folder is named by a hash of the origin, and
each of its checkpoints holds the origin.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.config.addresses import local_path
from tasks.config.old_train import to_new_form
from tasks.errors import UserError
from tasks.system.files import fingerprint, sha256
from tasks.tracking.journal import flatten
from training.objectives.mixture import long_form
from training.trainer import checkpoint_files

PARAMETER = "train.resume_from_checkpoint"
TRAINING_FILE = "training"  # in a run's folder: names the folder of its training
INCOMPATIBLE = ("adapter", "dtype", "quantization")  # of `train`: another value means other parameters
DATA_ORDER = ("global_batch_size", "seed")  # of `train`: these decide the pairs of a step
INPUTS = {"base": "another base model", "pairs": "other pairs", "reference": "other reference log-probabilities"}

Origin = Mapping[str, Any]


def training_hash(origin: Origin) -> str:
    """The name of a training's folder: a hash of everything that determines its weights, except rounding.

    It ignores parameters of `train` that only affect the logs, or when a run gives up.
    """
    train = dict(origin["train"])
    ignored = ["resume_from_checkpoint", "max_skipped_steps", "epochs", "max_steps"]  # `steps` has their effect
    if not train["stop_on_alarm"]:
        ignored += ["logging_steps", "kl_limit"]
    if not train["select"]:
        ignored += ["eval_steps"]
    for name in ignored:
        del train[name]
    return fingerprint({**origin, "train": train, "run": None})


def find_checkpoint(name: str, runs: Path, key: bytes) -> Path:
    """The checkpoint that `resume_from_checkpoint` names, or the newest one of the training or run that it names."""
    training = runs / name / TRAINING_FILE
    folder = Path(training.read_text()) if "/" not in name and training.exists() else local_path(name).resolve()
    if not folder.is_dir():
        trained = sorted(path.parent.name for path in runs.glob(f"*/{TRAINING_FILE}"))
        raise UserError(
            f"params.yaml: {PARAMETER} is '{name}', but {folder} does not exist. Set it to auto, never, the folder of "
            f"a checkpoint or of a training, or the name of a run that trained ({', '.join(trained[-10:]) or 'none'})."
        )
    if (folder / "manifest.json").exists():
        if damage := checkpoint_files.find_damage(folder, key):
            raise UserError(
                f"params.yaml: {PARAMETER}: the checkpoint {folder} cannot be used: {damage}. Choose another one. "
                f"Loading a checkpoint runs code from it: if you trust its source, `dpo sign {folder}` accepts it."
            )
        return folder
    newest = next(checkpoint_files.whole_checkpoints(folder, key), None)
    if newest is None:
        raise UserError(f"params.yaml: {PARAMETER}: {folder} has no complete checkpoint. Choose another folder.")
    return newest


def checkpoint_hash(path: Path) -> str:
    """The hash of its manifest, which holds the hash of every file."""
    return sha256(path / "manifest.json")


def list_changes(before: Origin, now: Origin) -> list[str]:
    """What differs between two trainings."""
    old, new = (flatten({"train": _comparable(origin)}) for origin in (before, now))
    changes = [
        f"{name} {json.dumps(old.get(name))} -> {json.dumps(new.get(name))}"
        for name in sorted({*old, *new} - {PARAMETER})
        if old.get(name) != new.get(name)
    ]
    changes += [description for name, description in INPUTS.items() if before.get(name) != now.get(name)]
    old_code, new_code = before.get("code", {}), now.get("code", {})
    if files := sorted(name for name in {*old_code, *new_code} if old_code.get(name) != new_code.get(name)):
        more = f" and {len(files) - 3} more files" if len(files) > 3 else ""
        changes.append(f"code of {', '.join(files[:3])}{more}")
    return changes


def _comparable(origin: Origin) -> dict[str, Any]:
    """`train` of an origin, also of an earlier version's, with the weight and the options of each loss."""
    train = dict(to_new_form(origin).get("train", {}))
    return {**train, "loss": long_form(train["loss"])} if "loss" in train else train


def incompatible_changes(before: Origin, now: Origin) -> list[str]:
    """The changes after which the checkpoint's state does not fit."""
    prefixes = (*(f"train.{name}" for name in INCOMPATIBLE), INPUTS["base"])
    return [change for change in list_changes(before, now) if change.startswith(prefixes)]


def check_compatible(path: Path, now: Origin) -> None:
    """UserError if the training cannot continue from a checkpoint."""
    state = checkpoint_files.read_state(path)
    if "origin" not in state:
        raise UserError(f"params.yaml: {PARAMETER}: {path} does not name its training. Choose another checkpoint.")
    if changes := incompatible_changes(state["origin"], now):
        raise UserError(
            f"params.yaml: {PARAMETER}: this training cannot continue from {path}: {', '.join(changes)}. "
            f"Undo the changes, or set {PARAMETER} to auto to start from the base model."
        )
    if state["step"] >= now["steps"]:
        raise UserError(
            f"params.yaml: {PARAMETER}: {path} is of step {state['step']}, but this training ends at step "
            f"{now['steps']}. Raise train.epochs or train.max_steps."
        )


def describe_continuation(path: Path, now: Origin) -> str:
    """The message of a training that continues from another one's checkpoint."""
    state = checkpoint_files.read_state(path)
    before, train, step = state["origin"], now["train"], state["step"]
    notes = list_changes(before, now)
    warmup = math.ceil(now["steps"] * train["warmup_fraction"])
    if before["steps"] != now["steps"] and (train["schedule"] != "constant" or step < warmup):
        notes.append(f"the learning-rate schedule is recomputed over {now['steps']} steps")
    if before["pairs"] != now["pairs"] or any(before["train"][name] != train[name] for name in DATA_ORDER):
        notes.append(f"from step {step + 1} on, steps use other pairs than before")
    return f"resuming from step {step} of run {before['run']}: {', '.join(notes) or 'nothing changed'}"


def describe_resume(path: Path, now: Origin) -> str:
    """The message of a training that continues from its own checkpoint; its logs may change from there on."""
    state = checkpoint_files.read_state(path)
    changes = list_changes(state.get("origin", {}), now)
    suffix = f"; changed: {', '.join(changes)}" if changes else ""
    return f"resuming from the checkpoint of step {state['step']}{suffix}"


def suggest_checkpoint(trainings: Path, now: Origin) -> str | None:
    """The message of a training that starts from step 0: which checkpoint of a similar one it could continue from."""
    candidates = []
    for path in trainings.glob("*/step-*"):
        before = checkpoint_files.read_state(path).get("origin", {})
        same_inputs = all(before.get(name) == now[name] for name in ("base", "pairs"))
        if same_inputs and not incompatible_changes(before, now):
            changes = list_changes(before, now) or ["it continued from another checkpoint"]
            candidates.append((len(changes), -path.stat().st_mtime, path, changes))
    if not candidates:
        return None
    _, _, path, changes = min(candidates)
    return (
        f"starting from step 0. {path} has the same pairs and base model, but these changed: {', '.join(changes)}. "
        f"To continue from it, set {PARAMETER}: {path}"
    )
