"""Runs of the pipeline side by side: a process each, so many at once, none of which stops another.

Runs that share data, base model and reference do not all compute them: the first goes ahead alone until it is past the
reference, and the others find its values.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

from flows import ROOT, child
from flows.trials import Trial

SHARED = "reference"  # the last stage that runs may have in common
PROGRESS = re.compile(r"^(?P<stage>\w+): (?P<done>\d+)/(?P<total>\d+) ")
PAUSE = 0.2  # seconds between two looks


@dataclass
class Running:
    trial: Trial
    process: subprocess.Popen[str]
    log: Path
    stack: ExitStack
    began: float = field(default_factory=time.monotonic)
    read: int = 0  # bytes of the log
    doing: str = "starting"

    def lines(self) -> list[str]:
        """What the run has said since the last look."""
        with self.log.open("rb") as file:
            file.seek(self.read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.read += len(whole)
        return whole.decode(errors="replace").splitlines()


def side_by_side(
    trials: Sequence[Trial],
    at_once: int,
    command: Callable[[Trial], list[str]],
    folder: Path,
    tags: Mapping[str, str],
    ended: Callable[[Trial, int, float], None],
    told: Callable[[Sequence[Running], int], None],
) -> None:
    """Run all; `ended` hears of each with its exit code and seconds, `told` of those at work and how many wait."""
    waiting, shared, past = list(trials), set[str](), _past()
    with _all_ended() as running:
        while waiting or running:
            for trial in _next(waiting, running, shared, at_once):
                waiting.remove(trial)
                running.append(_start(trial, command(trial), folder, tags))
            time.sleep(PAUSE)
            for one in list(running):
                if _watch(one, past):
                    shared.add(one.trial.group)
                if one.process.poll() is not None:
                    running.remove(one)
                    one.stack.close()
                    ended(one.trial, one.process.returncode, time.monotonic() - one.began)
            told(running, len(waiting))


def _next(waiting: list[Trial], running: list[Running], shared: set[str], at_once: int) -> list[Trial]:
    """Who may start now: whose group is past the reference, or who goes ahead for a group."""
    chosen: list[Trial] = []
    for trial in waiting:
        ahead = [one.group for one in (*(one.trial for one in running), *chosen)]
        if len(ahead) < at_once and (trial.group in shared or trial.group not in ahead):
            chosen.append(trial)
    return chosen


def _start(trial: Trial, command: list[str], folder: Path, tags: Mapping[str, str]) -> Running:
    log = folder / f"{trial.name}.log"
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w"))
        process = stack.enter_context(child.started(command, ROOT, environment(tags), output))
        return Running(trial, process, log, stack.pop_all())
    raise AssertionError("not reached")


def environment(tags: Mapping[str, str]) -> dict[str, str]:
    """Of a run of its own, on our server: nothing that says whose run this process is goes along."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DPO_", "PREFECT__"))}
    login = PREFECT_API_AUTH_STRING.value()
    api = {"PREFECT_API_URL": PREFECT_API_URL.value() or "", **({"PREFECT_API_AUTH_STRING": login} if login else {})}
    site = {
        name: value for name, value in os.environ.items() if name == "DPO_CLUSTER" or name.startswith("DPO_MLFLOW_")
    }
    return {**clean, **api, **site, "PYTHONUNBUFFERED": "1", "DPO_TAGS": json.dumps(dict(tags))}


def _watch(one: Running, past: re.Pattern[str]) -> bool:
    """Read on in the log; whether the run is past what it shares."""
    lines = one.lines()
    for line in lines:
        if match := PROGRESS.match(line):
            one.doing = f"{match['stage']} {match['done']}/{match['total']}"
    return any(past.match(line) for line in lines)


def _past() -> re.Pattern[str]:
    """A line of any stage behind the shared ones."""
    stages = list(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])
    behind = stages[stages.index(SHARED) + 1 :] if SHARED in stages else stages
    return re.compile(rf"^({'|'.join(behind)}): ")


@contextmanager
def _all_ended() -> Iterator[list[Running]]:
    """Whatever ends us ends what we started: all are told first, and then waited for."""
    running: list[Running] = []
    try:
        yield running
    finally:
        for one in running:
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGTERM)
        for one in running:
            one.stack.close()
