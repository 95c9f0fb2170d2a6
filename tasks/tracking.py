"""What happened, in MLflow: a parent run per pipeline run, a child per executed stage.

A stage writes a journal of JSON lines and nothing else; a second process reads the journal and forwards it. So a
tracking server that is slow or gone never holds a stage up, and what was not sent is sent by the next stage or by
`python -m tasks.tracking`. This file alone knows MLflow, and imports it in that second process only.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from tasks.files import fingerprint, home, read_json, write_json
from tasks.params import Cluster, Params

PATIENCE_SECONDS = 60  # how long a stage waits for its journal to be forwarded


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
        self.write("artifact", path=str(path.resolve()))

    def write(self, kind: str, **content: Any) -> None:
        line = {"kind": kind, "time": int(time.time() * 1000), **content}
        self._file.write(json.dumps(line, default=str) + "\n")


@contextmanager
def tracked(stage: str, params: Params, cluster: Cluster) -> Iterator[Run]:
    """A run around a stage: its journal is forwarded while it works and ends with how it ended."""
    folder = home() / cluster.logging_dir / run_key(params, home() / cluster.logging_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "settings.json", {"exp_name": cluster.exp_name, "tracking_uri": _absolute(cluster.tracking_uri)}
    )
    write_json(folder / "params.json", params.model_dump())
    run = Run(folder, stage)
    run.write("start", pid=os.getpid())
    run.params(flatten(params.model_dump()[stage]))
    forwarder = _start_forwarder(folder, stage)
    status = "FAILED"
    try:
        yield run
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        run.write("end", status=status)
        _note_end(folder, status)
        _wait(forwarder, folder, stage)


def run_key(params: Params, folder: Path) -> str:
    """Which pipeline run this stage belongs to: the flow says it; by hand it is the `dvc` that called us.

    After a crash the next call with the same params continues the run that did not end.
    """
    if key := os.environ.get("DPO_RUN"):
        return key
    caller, state = _calling_dvc(), folder / "by-hand.json"
    content = fingerprint(params.model_dump())
    last = read_json(state) if state.exists() else {}
    same = last.get("caller") == caller or (last.get("status") != "FINISHED" and last.get("params") == content)
    key = last["key"] if last and same else f"dvc-{datetime.now():%Y%m%d-%H%M%S}"
    write_json(state, {"key": key, "caller": caller, "params": content, "status": "RUNNING"})
    return key


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def _calling_dvc() -> str:
    for process in psutil.Process().parents():
        if process.name().startswith("dvc") or "dvc" in " ".join(process.cmdline()[:3]):
            return f"{process.pid}-{process.create_time():.0f}"
    return f"{os.getpid()}-{psutil.Process().create_time():.0f}"


def _note_end(folder: Path, status: str) -> None:
    state = folder.parent / "by-hand.json"
    if state.exists() and read_json(state)["key"] == folder.name:
        write_json(state, {**read_json(state), "status": status})


def _absolute(uri: str) -> str:
    """SQLite's path is relative to the project, whichever worktree a run is in."""
    scheme, _, path = uri.partition("sqlite:///")
    return uri if scheme or path.startswith("/") else f"sqlite:///{home() / path}"


def _last_step(journal: Path) -> dict[str, int]:
    steps: dict[str, int] = {}
    for line in read_lines(journal)[0]:
        if line["kind"] == "metrics":
            steps.update(dict.fromkeys(line["values"], line["step"]))
    return steps


def read_lines(journal: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The journal's whole lines from a byte offset on, and the offset behind them."""
    if not journal.exists():
        return [], offset
    with journal.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], offset + len(whole)


def _start_forwarder(folder: Path, stage: str) -> subprocess.Popen:
    log = (folder / f"{stage}.forward.log").open("a")
    command = [sys.executable, "-m", "tasks.tracking", "--follow", str(folder), stage, str(os.getpid())]
    # A session of its own: Ctrl-C ends the stage, and the forwarder still has to say so.
    return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)


def _wait(forwarder: subprocess.Popen, folder: Path, stage: str) -> None:
    try:
        code = forwarder.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        code = None  # it goes on by itself until it has sent what there is
    if code != 0:
        print(
            f"warning: MLflow could not be reached in time; the figures of {stage} are kept in {folder} and "
            "`python -m tasks.tracking` sends them. See "
            f"{folder / (stage + '.forward.log')}",
            file=sys.stderr,
            flush=True,
        )


def main() -> None:
    """Forward one journal while its stage writes it, or everything that has not been sent."""
    from tasks.forward import follow, send_all

    if sys.argv[1:2] == ["--follow"]:
        follow(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        from tasks.params import load_cluster

        print(f"sent {send_all(home() / load_cluster().logging_dir)} journals")


if __name__ == "__main__":
    main()
