"""A copy of a run's curves and results in Weights & Biases, where infra/cluster.yaml names a project.

A process beside the uploader sends the journals, each line once, so that MLflow never waits for W&B. The next stage or
`dpo sync` sends what failed. W&B's own variables configure it: WANDB_API_KEY, WANDB_ENTITY, WANDB_MODE.
"""

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.system.files import read_json, read_json_or_empty, write_json
from tasks.system.lock import file_lock
from tasks.tracking.journal import flatten
from tasks.tracking.journal_reader import Position, read_run

STATE = "wandb.json"  # in the run's folder: W&B's id of the run, and how far each journal was sent
INTERVAL_SECONDS = 1.0
LAST_SECONDS = 60.0  # that the process has for the rest after its uploader has ended
STEP = "step"  # the x axis of all curves: W&B's own counter must never go back, and a stage's steps start anew


def check_installed(project: str | None) -> None:
    if project and find_spec("wandb") is None:
        raise UserError(
            f"infra/cluster.yaml: wandb_project is {project}, and the package wandb is not installed. Run "
            "`.venv/bin/pip install wandb`, or set wandb_project to null."
        )


@contextmanager
def mirrored(folder: Path) -> Iterator[None]:
    """A process that copies the run's journals to W&B, as they grow. It ends by itself, soon after the caller."""
    if not _project(folder):
        yield
        return
    process = subprocess.Popen([sys.executable, "-m", __name__, str(folder)], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert process.stdin
        process.stdin.close()


def send_all(runs: Path) -> list[str]:
    """Send what earlier processes could not send; returns the names of the runs that failed."""
    command = [sys.executable, "-m", __name__]
    folders = [path.parent for path in sorted(runs.glob("*/settings.json")) if unsent(path.parent)]
    return [f.name for f in folders if subprocess.run([*command, str(f)], stdin=subprocess.DEVNULL).returncode]


def unsent(folder: Path) -> bool:
    """Whether the run has lines that its W&B project does not have."""
    return bool(_project(folder) and read_run(folder, partial(_sent, read_json_or_empty(folder / STATE))))


def _sent(state: Mapping[str, Any], stage: str) -> Position:
    sent = state.get("sent", {}).get(stage, {})
    return Position(**sent) if isinstance(sent, dict) else Position(sent)  # version 0.1 wrote a number of bytes


def _project(folder: Path) -> str | None:
    return read_json_or_empty(folder / "settings.json").get("wandb_project")


def _send_new(folder: Path, run: Any) -> Any:
    """Send the new lines of all journals; returns the connection to W&B, which the first new line opens."""
    state = {"id": uuid.uuid4().hex[:12], "sent": {}, **read_json_or_empty(folder / STATE)}
    for stage, (lines, position) in read_run(folder, partial(_sent, state)).items():
        run = run or _open(folder, state["id"])
        for line in lines:
            _apply(run, line)
        state["sent"][stage] = asdict(position)
        write_json(folder / STATE, state)
    return run


def _open(folder: Path, run_id: str) -> Any:
    import wandb

    run = wandb.init(
        project=_project(folder),
        id=run_id,
        name=folder.name,
        resume="allow",
        dir=folder,
        config=flatten(read_json(folder / "params.json")),
        settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
    )
    run.define_metric("*", step_metric=STEP)
    return run


def _apply(run: Any, line: Mapping[str, Any]) -> None:
    match line["kind"]:
        case "metrics":
            run.log({**line["values"], STEP: line["step"]})
        case "summary":
            run.summary.update(line["values"])
        case "tags":
            tags = {f"tags.{name}": value for name, value in line["values"].items()}
            run.config.update(tags, allow_val_change=True)


def main() -> None:
    """Copy the journals of the run whose folder is the argument, until standard input ends."""
    folder, over = Path(sys.argv[1]), threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()
        time.sleep(LAST_SECONDS)  # W&B's package would wait for a server for ever
        print(
            f"error: Weights & Biases did not answer in {LAST_SECONDS:.0f} s; `dpo sync` tries again", file=sys.stderr
        )
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    with file_lock(folder / "wandb.lock"):
        run, last = None, False
        while not last:
            last = over.wait(INTERVAL_SECONDS)
            run = _send_new(folder, run)
        if run:
            run.finish()


if __name__ == "__main__":
    main()
