"""Small real workspaces for tests: our params, a tiny model, a few rows of the demo; stages run as commands."""

import atexit
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml

from tasks.artifacts import demo
from tasks.cluster import kept_ray
from tasks.config.cluster import Cluster, load_cluster
from tasks.config.params import overlay, read_recipe
from tasks.config.strict import dotted, read_yaml
from tasks.system.environment import QUIET
from tasks.system.lock import file_lock
from tests.support import fork_server
from tests.support.fork_server import family

PROJECT = Path(__file__).resolve().parents[2]
_until_exit = ExitStack()
atexit.register(_until_exit.close)
SMALL = {
    "prepare.eval_fraction": 0.2,
    "train.global_batch_size": 8,
    "train.logging_steps": 1,
    "train.epochs": 4,
    "train.adapter.rank": 4,
    "evaluate.prompts": 4,
    "evaluate.max_new_tokens": 8,
}
NO_JUDGE = {  # for rows in a file: the demo's judge works on `source.data: demo` only
    "evaluate.judge": "auto",
    "promote.require": {"rewards/accuracies": 0.9},
    "promote.max_regression": {"rewards/accuracies": 0.05},
}
GROUPS = {
    "tensorboard": True,
    "system_metrics": 0.2,
    "reference.shard_pairs": 16,
    "actor_train.num_workers": 1,  # each takes 15 seconds of a core to start
    "actor_train.save_steps": 4,
    "actor_train.row_tokens": 256,
}


def make_workspace(
    root: Path, model: Path, rows: int = 120, cluster: dict[str, Any] | None = None, **params: Any
) -> Path:
    """The demo's recipe with a few of its rows in a file; `source.data=demo` keeps its judge and its gate."""
    (root / "infra").mkdir(parents=True)
    write_data(root / "pairs.jsonl", demo.rows(0)[:rows])
    judge = {} if params.get("source.data") == "demo" else NO_JUDGE
    overrides = {"source.data": "pairs.jsonl", "source.model": str(model), **SMALL, **judge, **params}
    (root / "params.yaml").write_text(yaml.safe_dump(overlay(demo_params(), dotted(overrides))))
    write_cluster(root, cluster or {})
    return root


def demo_params() -> dict[str, Any]:
    """params.yaml with the recipe demo."""
    return overlay(read_yaml(PROJECT / "params.yaml"), read_recipe("demo"))


def write_cluster(root: Path, changes: dict[str, Any]) -> None:
    content = overlay(read_yaml(PROJECT / "infra" / "cluster.yaml"), dotted({**GROUPS, **changes}), Cluster)
    (root / "infra" / "cluster.yaml").write_text(yaml.safe_dump(content))


def write_data(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(workspace: Path, stage: str, **variables: str) -> subprocess.Popen[str]:
    """A stage with an embedded Ray of its own, as by hand: a test may kill any of its processes."""
    return subprocess.Popen(
        [sys.executable, "-m", "tasks", stage],
        cwd=workspace,
        env={**environment(), "FORK_STAGES": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DPO_")}
    env |= QUIET  # which a library may have changed in this process: stages share a cluster only if they agree
    return {**env, "PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, [env.get("PYTHONPATH")])])}


def run(workspace: Path, *stages: str) -> str:
    """Run stages one after the other, on this test process's Ray cluster; each must succeed.

    Several stages are one run, as with `dvc repro`: one uploader sends their journals.
    """
    output, together = "", {"DPO_RUN": f"run-{uuid.uuid4().hex[:8]}"} if len(stages) > 1 else {}
    for stage in stages:
        needed = kept_ray.is_needed(load_cluster(workspace), [stage], [stage])
        process = start_shared(workspace, stage, **together) if needed else start(workspace, stage, **together)
        said, _ = process.communicate(timeout=900)
        assert process.returncode == 0, f"{stage}: {said}"
        output += said
    return output


def start_shared(workspace: Path, stage: str, **variables: str) -> subprocess.Popen[str]:
    """A stage on the tests' Ray cluster, which lives on if a test kills the stage or its `shared_workers`."""
    return start(workspace, stage, **variables, **shared_ray())


def shared_ray() -> dict[str, str]:
    """The environment variable that leads a stage to the tests' Ray cluster."""
    return kept_ray.variables(_ray())


def shared_workers(driver: subprocess.Popen[str], title: str) -> list[psutil.Process]:
    """The worker processes of that cluster with this title that work for this stage."""
    logs = _ray() / "ray" / "session_latest" / "logs"  # which has a file for each driver and worker
    pids = {process.pid for process in family(driver.pid)}
    jobs = {job for job, pid in _in_names(logs, r"python-core-driver-(\w{8})f+_(\d+)\.log") if pid in pids}
    at_work = {pid for job, pid in _in_names(logs, r"worker-\w+-(\w{8})-(\d+)\.out") if job in jobs}
    return [process for process in psutil.process_iter() if process.pid in at_work and title in _title(process)]


def _in_names(logs: Path, pattern: str) -> list[tuple[str, int]]:
    """The jobs and process ids in names of files."""
    return [(match[1], int(match[2])) for path in logs.glob("*") if (match := re.fullmatch(pattern, path.name))]


@cache
def _ray() -> Path:
    """One embedded cluster for the stages that nobody disturbs, of all test processes: an idle one takes a twentieth of
    a core. The process that needs it first holds it; those of pytest-xdist live until all tests are over."""
    together = os.environ.get(fork_server.ADDRESS)
    session = Path(together).parent if together else Path(_until_exit.enter_context(TemporaryDirectory()))
    with file_lock(session / "ray.lock"):
        if not (named := session / "ray").exists():
            (session / "cluster" / "infra").mkdir(parents=True)
            write_cluster(session / "cluster", {"actor_train.num_workers": 12})  # enough for all processes at once
            named.write_text(str(_until_exit.enter_context(kept_ray.keep(session / "cluster", environment()))))
    return Path(named.read_text())


def workers(driver: subprocess.Popen[str], count: int = 2, title: str = "RayTrainWorker") -> list[psutil.Process]:
    """The worker processes of a group, once all have started."""
    found: list[psutil.Process] = []
    while len(found) < count:
        assert driver.poll() is None, driver.communicate()[0]
        found = [process for process in family(driver.pid) if title in _title(process)]
        time.sleep(0.2)
    return found


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended while we looked
        return ""


def wait_for_step(process: subprocess.Popen[str], workspace: Path) -> Path:
    """Wait until a step is logged; the path of rank 0's journal."""
    while not (found := [p for p in workspace.glob(".scratch/train/*/metrics.jsonl") if '"loss"' in p.read_text()]):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return found[0]


def refusal(workspace: Path, stage: str) -> str:
    """Run a stage that must fail with one message: exit code 2 and no traceback."""
    process = start(workspace, stage)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 2, said
    assert "Traceback" not in said
    (sentence,) = [line for line in said.splitlines() if line.startswith("error: ")]
    return sentence


def tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name of every event file in a folder, in the order of the files."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.*")):
        content = path.read_bytes()
        while content:  # a TFRecord: length, its checksum, the event, its checksum
            length = int.from_bytes(content[:8], "little")
            event, content = Event.FromString(content[12 : 12 + length]), content[16 + length :]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def wait_for(condition: Callable[[], Any], seconds: float, pause: float = 0.1) -> None:
    """Wait so long on an idle machine, and four times as long on one that others use too."""
    until = time.monotonic() + 4 * seconds
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(pause)
