"""Which pipeline run a stage belongs to: the flow says it; by hand it is the `dvc` that called us."""

import os
from datetime import datetime
from pathlib import Path

import psutil

from tasks.files import fingerprint, recall, write_json
from tasks.params import Params

STATE = "by-hand.json"


def run_key(params: Params, runs: Path) -> str:
    """The key of the pipeline run. After a crash the next call with the same params continues what did not end."""
    if key := os.environ.get("DPO_RUN"):
        return key
    caller, content = _calling_dvc(), fingerprint(params.model_dump())
    last = recall(runs / STATE)
    same = last.get("caller") == caller or (last.get("status") != "FINISHED" and last.get("params") == content)
    key = last["key"] if last.get("key") and same else f"dvc-{datetime.now():%Y%m%d-%H%M%S}"
    write_json(runs / STATE, {"key": key, "caller": caller, "params": content, "status": "RUNNING"})
    return key


def note_end(folder: Path, status: str) -> None:
    """How the last stage of a run by hand ended."""
    state = folder.parent / STATE
    noted = recall(state)
    if noted.get("key") == folder.name:
        write_json(state, {**noted, "status": status})


def _calling_dvc() -> str:
    for process in psutil.Process().parents():
        if process.name().startswith("dvc") or "dvc" in " ".join(process.cmdline()[:3]):
            return f"{process.pid}-{process.create_time():.0f}"
    return f"{os.getpid()}-{psutil.Process().create_time():.0f}"
