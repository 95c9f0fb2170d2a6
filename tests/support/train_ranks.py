"""Training runs without Ray, as torchrun would start them: python train_ranks.py SETTINGS.json LOG.json.

This is one rank if RANK is set; otherwise it forks all of WORLD_SIZE, because imports take more time than a run. For
the same reason the settings are a list of runs, done one after the other.
"""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # DeepSpeed imports it late, and torch's compiler with it

from tests.support.settings import KEY, make_settings
from training.models import head
from training.objectives.objective import Objective
from training.trainer import checkpoint, engine, loop

SCALING, CHUNK_BYTES = {**engine.LOSS_SCALING}, head.CHUNK_BYTES


def run(given: dict) -> list[dict]:
    pairs = pickle.loads(Path(given.pop("pairs")).read_bytes())
    engine.LOSS_SCALING |= {**SCALING, **given.pop("loss_scaling", {})}
    head.CHUNK_BYTES = given.pop("chunk_bytes", CHUNK_BYTES)
    start, killed = given.pop("start", None), given.pop("killed", None)
    again_from = given.pop("again_from", None)
    held_out, first = {}, 0  # the first eight pairs, by source
    for source, count in given.pop("held_out", {"": 8}).items():
        held_out[source] = pairs[first : first + count]
        first += count
    given["objective"] = Objective(*given["objective"])
    settings = make_settings(**given)
    checkpoint.claim(Path(settings.folder), "test")
    if start:  # another training's checkpoint
        checkpoint.adopt(Path(start), Path(settings.folder))
    if killed:  # what a run that was killed after that step has left
        checkpoints = sorted(Path(killed["run"]).glob("step-*"))[: killed["after"]]
        for path in (*checkpoints, Path(killed["run"]) / "best"):
            shutil.copytree(path, Path(settings.folder) / path.name)
    if again_from and os.environ["RANK"] == "0":  # the same run again, from an earlier checkpoint
        for path in Path(settings.folder).glob("step-*"):
            if int(path.name.removeprefix("step-")) > again_from:
                shutil.rmtree(path)
    log: list[dict] = []

    def note(step: int, values: dict) -> None:
        if "checkpoint_seconds" not in values:  # no two are equal
            log.append({"step": step, **values})

    try:
        loop.train(
            settings,
            pairs[8:],
            held_out,
            log=note,
            notify=lambda message: log.append({"said": message}),
            key=KEY,
        )
    except (ValueError, FloatingPointError) as error:
        log.append({"refused": str(error)})
    return log


def fork_ranks(world: int) -> None:
    """Return in each rank; the parent exits with 1 if one of them failed."""
    children = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    os._exit(any(statuses))


if "RANK" not in os.environ:
    fork_ranks(int(os.environ["WORLD_SIZE"]))
logs = {given.pop("name"): run(given) for given in json.loads(Path(sys.argv[1]).read_text())}
if os.environ["RANK"] == "0":
    Path(sys.argv[2]).write_text(json.dumps(logs))
sys.stdout.flush()
os._exit(0)  # gloo's threads may outlive the interpreter
