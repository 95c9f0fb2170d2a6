"""A pipeline run in MLflow: a parent run, and a child run for each executed stage.

`record_stage` surrounds a stage; `begin` and `finish` surround a flow. Both write journals (journal.py), which one
uploader process per pipeline run sends.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import yaml

from tasks.checkout import child_environment, this_run
from tasks.config.cluster import changed_values
from tasks.config.paths import METRICS, PAIRS, RAW, main_checkout
from tasks.secrets.redact import redact, redacted
from tasks.system import disk, processes
from tasks.system.files import fingerprint, read_json, read_json_or_empty, write_json, write_text
from tasks.system.processes import this_process
from tasks.system.progress import notify
from tasks.tracking.journal import FLOW, StageJournal, flatten
from tasks.tracking.journal_reader import read_journal, sent
from tasks.tracking.mlflow_client import CONFIGURATION, ERROR, absolute_uri
from tasks.tracking.results import curves, datasets, evaluation, git_output, lineage
from tasks.tracking.uploader import is_sending
from tasks.tracking.wandb_mirror import check_installed

if TYPE_CHECKING:
    from tasks.config.cluster import Cluster
    from tasks.config.params import Params

PATIENCE_SECONDS = 60.0  # how long a stage waits for its journal to be sent
LATER_SECONDS = 3.0  # the same after a stage of this run has waited in vain
SLOW, LOG = "upload.slow", "upload.log"  # in the run's folder: a stage has waited in vain; the uploader's output
PAIR_STAGES = ("sft", "reference", "train", "evaluate")  # stages that read the pairs
STATE = "by-hand.json"  # in the folder of all runs: the last run that `dvc repro` started by hand


@contextmanager
def record_stage(stage: str, params: "Params", cluster: "Cluster") -> Iterator[StageJournal]:
    """Record a stage in a journal, which is sent while the stage runs. Its last line is the status."""
    folder = open_run(params, cluster)
    run = StageJournal(folder, stage)
    run.write("start", **this_process())
    run.params(flatten(params.model_dump()[stage]))
    for data in datasets(PAIRS) if stage in PAIR_STAGES else ():
        run.dataset(**data)
    uploader = start_uploader(folder)
    status = "FAILED"
    try:
        with notify(run.progress):
            yield run
        run.tags(lineage())
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        try:
            run.write("end", status=status)
            record_end(folder, status)
            wait_until_sent(run, uploader)
        except OSError:
            if status == "FINISHED":  # otherwise the stage's own error matters more
                raise


def open_run(params: "Params", cluster: "Cluster", *, root: Path = Path(), folder: Path | None = None) -> Path:
    """Create the folder of the pipeline run in `root`, with the settings that the uploader reads.

    A flow names the folder; a stage by hand derives it from the `dvc` process that called it.
    """
    check_installed(cluster.wandb_project)
    runs = main_checkout() / cluster.logging_dir
    folder = folder or runs / run_name(params, runs)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "began": int(time.time() * 1000),
        "commit": git_output(root, "rev-parse", "HEAD") or "",
        **read_json_or_empty(folder / "settings.json"),  # a resumed run keeps its start and commit
        "exp_name": cluster.exp_name,
        "tracking_uri": absolute_uri(cluster.tracking_uri),
        "wandb_project": cluster.wandb_project,
    }
    write_json(folder / "settings.json", settings)
    (folder / "settings.json").chmod(0o600)  # an address may hold a password
    write_json(folder / "params.json", redacted(params.model_dump()))
    _write_configuration(folder / CONFIGURATION, cluster, root)
    return folder


def _write_configuration(file: Path, cluster: "Cluster", root: Path) -> None:
    """The cluster configuration in effect, and the origin of each value that is not the default."""
    origins = {name: value.origin for name, value in changed_values(root).items()}
    write_text(file, yaml.safe_dump(redacted({"cluster": cluster.model_dump(), "origins": origins}), sort_keys=False))


def run_name(params: "Params", runs: Path) -> str:
    """The name of the pipeline run. After a crash, the next call with the same params continues the unfinished run."""
    if run := this_run():
        return run
    caller, params_hash = _calling_dvc(), fingerprint(params.model_dump())
    last = read_json_or_empty(runs / STATE)
    unfinished = last.get("status") != "FINISHED" and last.get("params") == params_hash
    same_run = last.get("caller") == caller or unfinished
    run = last["run"] if last.get("run") and same_run else f"dvc-{datetime.now():%Y%m%d-%H%M%S}"
    write_json(runs / STATE, {"run": run, "caller": caller, "params": params_hash, "status": "RUNNING"})
    return run


def record_end(folder: Path, status: str) -> None:
    """Record how the last stage ended, if `dvc repro` by hand started the run."""
    state = folder.parent / STATE
    last = read_json_or_empty(state)
    if last.get("run") == folder.name:
        write_json(state, {**last, "status": status})


def _calling_dvc() -> str:
    for process in psutil.Process().parents():
        if process.name().startswith("dvc") or "dvc" in " ".join(process.cmdline()[:3]):
            return f"{process.pid}-{process.create_time():.0f}"
    return f"{os.getpid()}-{psutil.Process().create_time():.0f}"


def begin(folder: Path, tags: Mapping[str, str]) -> None:
    """The flow's journal begins with tags that only the flow knows, such as the recipe."""
    run = StageJournal(folder, FLOW)
    run.write("start", **this_process())
    run.tags(tags)
    run.artifact(folder / CONFIGURATION)  # a resumed run may have a new one
    start_uploader(folder)


def finish(folder: Path, *, root: Path, states: Mapping[str, str], status: str) -> None:
    """The flow's journal ends with the state of each stage, and the results that cached stages did not log."""
    run = StageJournal(folder, FLOW)
    run.tags({f"stage.{stage}": state for stage, state in states.items()})
    if (root / METRICS / "evaluate.json").exists() and status == "FINISHED":
        run.tags(lineage(root))
        for data in datasets(root / RAW, root / PAIRS):
            run.dataset(**data)
        steps = curves(root)
        known = read_journal(folder / "train.jsonl")[1].steps
        if any(step > known.get(name, -1) for step, values in steps.items() for name in values):
            run.curve(root / METRICS / "train.csv", known)
        run.summary(evaluation(read_json(root / METRICS / "evaluate.json")), max(steps, default=0))
    run.write("end", status=status)
    run.write("close")
    wait_until_sent(run, start_uploader(folder))  # the previous uploader may have ended meanwhile


def start_uploader(folder: Path) -> "subprocess.Popen[bytes]":
    """Start the process that sends this run's journals; if one is running, the new one ends at once."""
    (folder / ERROR).unlink(missing_ok=True)
    command = [sys.executable, "-m", "tasks.tracking.uploader", str(folder)]
    # In its own session and without the mark by which a stage's processes are ended: it must outlive the stage to
    # report its end. Without the writer's password: it logs in as `forwarder`, which cannot change the registry.
    withheld = (processes.FAMILY_VARIABLE, "DPO_MLFLOW_WRITER_PASSWORD")
    env = {name: value for name, value in child_environment().items() if name not in withheld}
    with (folder / LOG).open("a") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=env
        )


def wait_until_sent(run: StageJournal, uploader: "subprocess.Popen[bytes]") -> None:
    """Wait as long as a server that answers needs; the next stage or run sends the rest."""
    folder, deadline = run.folder, _deadline(run.folder)
    problem = reason = ""
    while not problem and sent(folder, run.stage).offset < run.path.stat().st_size:
        has_ended = uploader.poll() is not None and not is_sending(folder)  # a full disk, a kill
        if has_ended or (folder / ERROR).exists():
            problem = f"MLflow could not be reached; the metrics of {run.stage} are kept in {folder}"
            reason = f" Reason: {_reason(folder)}"
        elif time.monotonic() > deadline:
            (folder / SLOW).touch()
            problem = f"MLflow is slow; the metrics of {run.stage} are still being sent, and kept in {folder}"
        else:
            time.sleep(0.1)
    if problem:
        warning = f"warning: {problem}. The next run or `dpo sync` sends the rest.{reason}"
        print(redact(warning), file=sys.stderr, flush=True)


def _deadline(folder: Path) -> float:
    return time.monotonic() + (LATER_SECONDS if (folder / SLOW).exists() else PATIENCE_SECONDS)


def _reason(folder: Path) -> str:
    """The error that the uploader recorded, or the most likely one."""
    with suppress(FileNotFoundError):
        return (folder / ERROR).read_text().strip()
    return disk.explain_full() if disk.is_full() else f"The uploader ended; see {folder / LOG}."


def wait_for_run(folder: Path) -> None:
    """Wait until MLflow has given the pipeline run its id, or cannot be reached."""
    deadline = _deadline(folder)
    while not (folder / "run.json").exists() and not (folder / ERROR).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
