"""What happened, in MLflow: a parent run per pipeline run, a child per executed stage.

A stage writes a journal of JSON lines and nothing else; one more process for the whole pipeline run (tasks/forward.py)
sends the journals. So a tracking server that is slow or gone never holds a stage up, and what was not sent is sent by
the next stage or by `python -m tasks.forward`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.files import home, read_json, write_json
from tasks.params import Cluster, Params
from tasks.paths import BASE, METRICS, RAW
from tasks.runs import note_end, run_key

PATIENCE_SECONDS = 60  # how long a stage waits for its journal to be sent
FLOW = "flow"  # the journal of the pipeline run itself


class Run:
    """One stage's run, as a journal."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.stage = folder, stage
        self.journal = folder / f"{stage}.jsonl"
        self.logged = _last_step(self.journal)
        self._file = self.journal.open("a", buffering=1)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """By step; a step that a resumed stage repeats is not logged twice."""
        new = {name: value for name, value in values.items() if step > self.logged.get(name, -1)}
        if new:
            self.logged.update(dict.fromkeys(new, step))
            self.write("metrics", step=step, values=new)

    def summary(self, values: Mapping[str, float]) -> None:
        """Final values, of this run and of the whole pipeline run."""
        self.write("summary", values=dict(values))

    def params(self, values: Mapping[str, Any]) -> None:
        self.write("params", values=dict(values))

    def tags(self, values: Mapping[str, str]) -> None:
        """Of the whole pipeline run."""
        self.write("tags", values=dict(values))

    def dataset(self, name: str, digest: str, source: str) -> None:
        self.write("dataset", name=name, digest=digest, source=source)

    def artifact(self, path: Path) -> None:
        """A copy in the run's own folder is what is sent: by then the workspace may be gone."""
        if not path.resolve().is_relative_to(self.folder.resolve()):
            kept = self.folder / "artifacts" / self.stage / path.name
            kept.parent.mkdir(parents=True, exist_ok=True)
            path = Path(shutil.copyfile(path, kept))
        self.write("artifact", path=str(path.resolve()))

    def write(self, kind: str, **content: Any) -> None:
        line = {"kind": kind, "time": int(time.time() * 1000), **content}
        self._file.write(json.dumps(line, default=str) + "\n")


@contextmanager
def tracked(stage: str, params: Params, cluster: Cluster) -> Iterator[Run]:
    """A run around a stage: its journal is sent while it works, and ends with how it ended."""
    folder = open_run(params, cluster)
    run = Run(folder, stage)
    run.write("start", pid=os.getpid())
    run.params(flatten(params.model_dump()[stage]))
    start_forwarder(folder)
    status = "FAILED"
    try:
        yield run
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        run.write("end", status=status)
        note_end(folder, status)
        wait_until_sent(run)


def open_run(params: Params, cluster: Cluster, folder: Path | None = None) -> Path:
    """The folder of the pipeline run, with what the forwarder needs to know. The flow says which; a stage finds out."""
    runs = home() / cluster.logging_dir
    folder = folder or runs / run_key(params, runs)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "settings.json", {"exp_name": cluster.exp_name, "tracking_uri": absolute(cluster.tracking_uri)})
    write_json(folder / "params.json", params.model_dump())
    return folder


def finish(folder: Path, root: Path, states: Mapping[str, str], status: str) -> None:
    """The flow's last word: ran or cached by stage, and what a run without a single executed stage is about."""
    run = Run(folder, FLOW)
    run.tags({f"stage.{stage}": state for stage, state in states.items()})
    if (root / METRICS / "evaluate.json").exists() and status == "FINISHED":
        run.tags(lineage(root))
        run.summary(evaluation(read_json(root / METRICS / "evaluate.json")))
    run.write("end", status=status)
    run.write("close")
    wait_until_sent(run)


def lineage(root: Path = Path()) -> dict[str, str]:
    """Tags that say what data and which model a run was about."""
    raw, base = (read_json(root / folder / "manifest.json") for folder in (RAW, BASE))
    data = {"data": raw["source"], "data_sha256": raw["sha256"]}
    return {**data, "base": base["model"], "base_sha256": base["sha256"]}


def evaluation(metrics: Mapping[str, Any]) -> dict[str, float]:
    """data/metrics/evaluate.json under the names that MLflow shows: `eval/...` and `samples/...`; tables stay there."""
    shown = {name: value for name, value in metrics.items() if name != "tables"}
    flat = {name.replace(".", "/"): value for name, value in flatten(shown).items()}
    return {name if name.startswith("samples/") else f"eval/{name}": value for name, value in flat.items()}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def absolute(uri: str) -> str:
    """SQLite's path is relative to the project, whichever worktree a run is in."""
    scheme, _, path = uri.partition("sqlite:///")
    return uri if scheme or path.startswith("/") else f"sqlite:///{home() / path}"


def read_lines(journal: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The journal's whole lines from a byte offset on, and the offset behind them."""
    if not journal.exists():
        return [], offset
    with journal.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], offset + len(whole)


def _last_step(journal: Path) -> dict[str, int]:
    steps: dict[str, int] = {}
    for line in read_lines(journal)[0]:
        if line["kind"] == "metrics":
            steps.update(dict.fromkeys(line["values"], line["step"]))
    return steps


def sent(folder: Path, stage: str) -> int:
    """How many bytes of a journal have been sent."""
    file = folder / f"{stage}.sent.json"
    return read_json(file)["offset"] if file.exists() else 0


def start_forwarder(folder: Path) -> None:
    """Start the process that sends this run's journals; where one is at work, the new one ends at once."""
    (folder / "forward.error").unlink(missing_ok=True)
    log = (folder / "forward.log").open("a")
    command = [sys.executable, "-m", "tasks.forward", str(folder)]
    # A session of its own, without the mark by which a stage's processes are ended: the forwarder still has to say so.
    env = {name: value for name, value in os.environ.items() if name != "DPO_FAMILY"}
    subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=env)


def wait_until_sent(run: Run) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while sent(run.folder, run.stage) < run.journal.stat().st_size:
        if (run.folder / "forward.error").exists() or time.monotonic() > until:
            print(
                f"warning: MLflow could not be reached; the figures of {run.stage} are kept in {run.folder}, and "
                f"`python -m tasks.forward` sends them. Why: {run.folder / 'forward.log'}",
                file=sys.stderr,
                flush=True,
            )
            return
        time.sleep(0.1)


def wait_for_run(folder: Path) -> None:
    """Until MLflow has given the pipeline run its id, or will not."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not (folder / "run.json").exists() and not (folder / "forward.error").exists() and time.monotonic() < until:
        time.sleep(0.1)
