"""Training runs without Ray, as torchrun would start them: python train_ranks.py SETTINGS.json LOG.json.

The settings are the runs by number of ranks, done one after the other. This is one rank if RANK is set; otherwise it
forks the ranks of one number after the other, because the imports take more time than a run.
"""

import json
import os
import pickle
import shutil
import socket
import sys
from pathlib import Path

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # DeepSpeed imports it late, and torch's compiler with it

from tests.support.settings import KEY, make_settings
from training.objectives.objective import Objective
from training.scoring import head
from training.trainer import checkpoint_files, engine, loop

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
    checkpoint_files.claim(Path(settings.folder), "test")
    if start:  # another training's checkpoint
        checkpoint_files.adopt(Path(start), Path(settings.folder))
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


def run_all(runs: list[dict]) -> None:
    """Do the runs on this rank; rank 0 adds their logs to those in the file."""
    logs = {given.pop("name"): run(given) for given in runs}
    log = Path(sys.argv[2])
    if os.environ["RANK"] == "0":
        log.write_text(json.dumps((json.loads(log.read_text()) if log.exists() else {}) | logs))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter


def fork_ranks(world: int, runs: list[dict]) -> bool:
    """Do the runs in a process for each rank; whether all have succeeded."""
    ranks = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    children = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            os.environ.update(ranks, RANK=str(rank), LOCAL_RANK=str(rank))
            run_all(runs)
        children.append(child)
    return not any([os.waitpid(child, 0)[1] for child in children])  # noqa: C419  # wait for all


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


given = json.loads(Path(sys.argv[1]).read_text()).items()
if "RANK" in os.environ:
    ((_, runs),) = given
    run_all(runs)
if not all(fork_ranks(int(world), runs) for world, runs in given):
    sys.exit(1)
