"""Which checkpoint a training continues, and what differs from the training that made it.

A training's origin is everything that determines it, as plain JSON. Its folder is named by a hash of the origin, and
each of its checkpoints holds the origin.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.files import fingerprint, sha256
from tasks.models import local_path
from tasks.tracking.journal import flatten
from training import checkpoint

KEY = "train.resume_from_checkpoint"
TRAINING = "training"  # in a run's folder: which folder its training worked in
NOT_CONTINUED = ("adapter", "dtype", "quantization")  # of `train`: another value is another set of parameters
ORDER = ("global_batch_size", "seed")  # of `train`: which pairs a step takes

Origin = Mapping[str, Any]


def address(origin: Origin) -> str:
    """The name of a training's folder: a hash of what determines its weights, but for rounding.

    The rest of `train` only says what is logged, or when a run gives up.
    """
    train = dict(origin["train"])
    ignored = ["resume_from_checkpoint", "max_skipped_steps", "epochs", "max_steps"]  # the steps are counted
    if not train["stop_on_alarm"]:
        ignored += ["logging_steps", "kl_limit"]
    if not train["select"]:
        ignored += ["eval_steps"]
    for name in ignored:
        del train[name]
    return fingerprint({**origin, "train": train, "run": None})


def resolve(name: str, runs: Path, key: bytes) -> Path:
    """The checkpoint that `resume_from_checkpoint` names: itself, or the newest of a training's folder or of a run."""
    note = runs / name / TRAINING
    folder = Path(note.read_text()) if "/" not in name and note.exists() else local_path(name).resolve()
    if not folder.is_dir():
        trained = sorted(path.parent.name for path in runs.glob(f"*/{TRAINING}"))
        raise UserError(
            f"params.yaml: {KEY} is '{name}', and {folder} does not exist. Set it to auto, never, the folder of a "
            f"checkpoint or of a training, or a run that trained ({', '.join(trained[-10:]) or 'there is none'})."
        )
    if (folder / "manifest.json").exists():
        if damage := checkpoint.find_damage(folder, key):
            raise UserError(
                f"params.yaml: {KEY}: the checkpoint {folder} cannot be used: {damage}. Name another one. Loading a "
                f"checkpoint runs code that it names: `make sign WHAT={folder}` accepts it, if you trust its maker."
            )
        return folder
    newest = next(checkpoint.whole_checkpoints(folder, key), None)
    if newest is None:
        raise UserError(f"params.yaml: {KEY}: there is no whole checkpoint in {folder}. Name another one.")
    return newest


def content_hash(path: Path) -> str:
    """Of a checkpoint: its manifest has the hash of every file."""
    return sha256(path / "manifest.json")


def differences(before: Origin, now: Origin) -> list[str]:
    """What changed from one training to another."""
    old, new = (flatten({"train": origin.get("train", {})}) for origin in (before, now))
    found = [
        f"{name} {json.dumps(old.get(name))} -> {json.dumps(new.get(name))}"
        for name in sorted({*old, *new} - {KEY})
        if old.get(name) != new.get(name)
    ]
    words = {"base": "another base model", "pairs": "other pairs", "reference": "other reference log-probabilities"}
    found += [word for name, word in words.items() if before.get(name) != now.get(name)]
    code, known = before.get("code", {}), now.get("code", {})
    if changed := sorted(name for name in {*code, *known} if code.get(name) != known.get(name)):
        more = f" and {len(changed) - 3} more files" if len(changed) > 3 else ""
        found.append(f"code of {', '.join(changed[:3])}{more}")
    return found


def obstacles(before: Origin, now: Origin) -> list[str]:
    """Those of the differences because of which the state does not fit."""
    keys = tuple(f"train.{name}" for name in NOT_CONTINUED)
    return [one for one in differences(before, now) if one.startswith(keys) or one == "another base model"]


def check(path: Path, now: Origin) -> None:
    """UserError where the training cannot continue from a checkpoint."""
    state = checkpoint.read_state(path)
    if "origin" not in state:
        raise UserError(f"params.yaml: {KEY}: {path} does not say which training made it. Name another checkpoint.")
    if found := obstacles(state["origin"], now):
        raise UserError(
            f"params.yaml: {KEY}: this training cannot continue from {path}: {', '.join(found)}. "
            f"Change them back, or set {KEY} to auto to start from the base model."
        )
    if state["step"] >= now["steps"]:
        raise UserError(
            f"params.yaml: {KEY}: {path} is of step {state['step']}, and this training ends at step {now['steps']}. "
            "Raise train.epochs or train.max_steps."
        )


def continued(path: Path, now: Origin) -> str:
    """What is said when a training continues from another one's checkpoint."""
    state = checkpoint.read_state(path)
    before, train, step = state["origin"], now["train"], state["step"]
    notes = differences(before, now)
    warmup = math.ceil(now["steps"] * train["warmup_fraction"])
    if before["steps"] != now["steps"] and (train["schedule"] != "constant" or step < warmup):
        notes.append(f"the learning-rate schedule is recomputed over {now['steps']} steps")
    if before["pairs"] != now["pairs"] or any(before["train"][name] != train[name] for name in ORDER):
        notes.append(f"steps from {step + 1} on take other pairs than they would have")
    return f"resuming from step {step} of run {before['run']}: {', '.join(notes) or 'nothing has changed'}"


def resumed(path: Path, now: Origin) -> str:
    """What is said when a training goes on from its own checkpoint: what is logged may differ from there on."""
    state = checkpoint.read_state(path)
    notes = differences(state.get("origin", {}), now)
    later = f"; from there on {', '.join(notes)}" if notes else ""
    return f"resuming from the checkpoint of step {state['step']}{later}"


def other_training(trainings: Path, now: Origin) -> str | None:
    """Where a training starts from step 0: the checkpoint of the most similar one, and how to continue from it."""
    found = []
    for path in trainings.glob("*/step-*"):
        before = checkpoint.read_state(path).get("origin", {})
        same = all(before.get(name) == now[name] for name in ("base", "pairs"))
        if same and not obstacles(before, now):
            changed = differences(before, now) or ["it continued another checkpoint"]
            found.append((len(changed), -path.stat().st_mtime, path, changed))
    if not found:
        return None
    _, _, path, changed = min(found)
    return (
        f"starting from step 0. {path} has the same pairs and base model, but changed: {', '.join(changed)}. "
        f"To continue from it, set {KEY}: {path}"
    )
