"""What happened, in MLflow: a parent run per pipeline run, a child per executed stage.

A stage writes a journal of JSON lines and nothing else; one more process for the whole pipeline run
(tasks/tracking/forward.py) sends the journals. So a tracking server that is slow or gone never holds a stage up, and
what was not sent is sent by the next stage, the next run or `make sync`.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tasks import disk
from tasks.files import fingerprint, home, known_sha256, read_json, recall, write_json, write_text
from tasks.machines.flock import locked
from tasks.machines.process import this_process
from tasks.paths import BASE, CARD, METRICS, PAIRS, RAW, REFERENCE
from tasks.redact import redact, redacted

if TYPE_CHECKING:  # the forwarder needs none of what they import
    from tasks.params import Cluster, Params

PATIENCE_SECONDS = 60.0  # how long a stage waits for its journal to be sent
LATER_SECONDS = 3.0  # the same once a stage of this run has waited in vain
CONFIGURATION = "configuration.yaml"
FLOW = "flow"  # the journal of the pipeline run itself
ERROR, SLOW = "forward.error", "forward.slow"
READERS = ("reference", "train", "evaluate")  # stages whose input are the pairs


class Run:
    """One stage's run, as a journal."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.stage = folder, stage
        self.journal = folder / f"{stage}.jsonl"
        self.logged = _last_step(self.journal)
        self._file = self.journal.open("a", buffering=1)
        if _half_a_line(self.journal):  # of a stage that was killed: the next line is one of its own
            self._file.write("\n")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """By step; a step that a resumed stage repeats is not logged twice."""
        new = {name: value for name, value in values.items() if step > self.logged.get(name, -1)}
        if new:
            self.logged.update(dict.fromkeys(new, step))
            self.write("metrics", step=step, values=new)

    def summary(self, values: Mapping[str, float], at: int = 0) -> None:
        """Final values, of this run and of the whole pipeline run; `at` is the training step that they describe."""
        self.write("summary", values=dict(values), at=at)

    def progress(self, done: int, total: int, unit: str) -> None:
        """For the metrics endpoint (flows/metrics.py); MLflow gets none of it."""
        self.write("progress", done=done, total=total, unit=unit)

    def params(self, values: Mapping[str, Any]) -> None:
        self.write("params", values=dict(values))

    def tags(self, values: Mapping[str, str]) -> None:
        """Of the whole pipeline run."""
        self.write("tags", values=dict(values))

    def dataset(self, name: str, *, digest: str, source: str, rows: int | None = None) -> None:
        self.write("dataset", name=name, digest=digest, source=source, rows=rows)

    def artifact(self, path: Path) -> None:
        """A copy in the run's own folder is what is sent: by then the workspace may be gone."""
        if not path.resolve().is_relative_to(self.folder.resolve()):
            kept = self.folder / "artifacts" / self.stage / path.name
            kept.parent.mkdir(parents=True, exist_ok=True)
            path = Path(shutil.copyfile(path, kept))
        self.write("artifact", path=str(path.resolve()))

    def write(self, kind: str, **content: Any) -> None:
        line = {"kind": kind, "time": int(time.time() * 1000), **redacted(content)}
        self._file.write(json.dumps(line, default=str) + "\n")


@contextmanager
def tracked(stage: str, params: "Params", cluster: "Cluster") -> Iterator[Run]:
    """A run around a stage: its journal is sent while it works, and ends with how it ended."""
    from tasks.progress import told_to

    folder = open_run(params, cluster)
    run = Run(folder, stage)
    run.write("start", **this_process())
    run.params(flatten(params.model_dump()[stage]))
    for data in datasets(PAIRS) if stage in READERS else ():
        run.dataset(**data)
    forwarder = start_forwarder(folder)
    status = "FAILED"
    try:
        with told_to(run.progress):
            yield run
        run.tags(lineage())
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        from tasks.runs import note_end

        try:
            run.write("end", status=status)
            note_end(folder, status)
            wait_until_sent(run, forwarder)
        except OSError:
            if status == "FINISHED":  # otherwise the stage's own error is the one to tell
                raise


def open_run(params: "Params", cluster: "Cluster", *, root: Path = Path(), folder: Path | None = None) -> Path:
    """The folder of the pipeline run that works in `root`, with what the forwarder needs to know.

    A flow names the folder; a stage by hand derives it from the `dvc` process that called it.
    """
    from tasks.runs import run_key

    runs = home() / cluster.logging_dir
    folder = folder or runs / run_key(params, runs)
    folder.mkdir(parents=True, exist_ok=True)
    known = recall(folder / "settings.json")
    settings = {"exp_name": cluster.exp_name, "tracking_uri": absolute(cluster.tracking_uri)}
    since = {"began": int(time.time() * 1000), "commit": commit(root), **known}
    write_json(folder / "settings.json", {**since, **settings})
    (folder / "settings.json").chmod(0o600)  # an address may hold a password
    write_json(folder / "params.json", redacted(params.model_dump()))
    _write_configuration(folder / CONFIGURATION, cluster, root)
    return folder


def _write_configuration(file: Path, cluster: "Cluster", root: Path) -> None:
    """The machines' configuration in effect, and the origin of each value that is not the default."""
    from tasks.place import resolve

    origins = {name: found.origin for name, found in resolve(root).origins.items()}
    write_text(file, yaml.safe_dump(redacted({"cluster": cluster.model_dump(), "origins": origins}), sort_keys=False))


def begin(folder: Path, tags: Mapping[str, str]) -> None:
    """The flow's first word: what only the flow knows of the run, its recipe say."""
    run = Run(folder, FLOW)
    run.write("start", **this_process())
    run.tags(tags)
    run.artifact(folder / CONFIGURATION)  # of a resumed run it may be another now
    start_forwarder(folder)


def finish(folder: Path, *, root: Path, states: Mapping[str, str], status: str) -> None:
    """The flow's last word: ran or cached by stage, and what a run without a single executed stage is about."""
    run = Run(folder, FLOW)
    run.tags({f"stage.{stage}": state for stage, state in states.items()})
    if (root / METRICS / "evaluate.json").exists() and status == "FINISHED":
        run.tags(lineage(root))
        for data in datasets(root / RAW, root / PAIRS):
            run.dataset(**data)
        steps = curves(root)
        _log_missing(run, steps)
        run.summary(evaluation(read_json(root / METRICS / "evaluate.json")), max(steps, default=0))
    run.write("end", status=status)
    run.write("close")
    wait_until_sent(run, start_forwarder(folder))  # the last one may have thought that nobody writes any more


def commit(root: Path) -> str:
    """What git has checked out there: of a run in its own worktree, the snapshot. Nothing where there is no git."""
    try:
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def lineage(root: Path = Path()) -> dict[str, str]:
    """Tags that say what data, which model and which reference values a run was about, as far as they are there."""
    tags: dict[str, str] = {}
    for folder, kind, name in ((RAW, "data", "source"), (BASE, "base", "model")):
        if (file := root / folder / "manifest.json").exists():
            manifest = read_json(file)
            tags |= {kind: manifest[name], f"{kind}_sha256": manifest["sha256"]}
    if (file := root / REFERENCE / "manifest.json").exists():
        tags["reference"] = fingerprint(read_json(file))
    return tags


def datasets(*folders: Path) -> Iterator[dict[str, Any]]:
    """The data sets in these folders, as MLflow's inputs: data/raw by its manifest, pairs by their files."""
    for folder in folders:
        if (file := folder / "manifest.json").exists():
            raw = read_json(file)
            yield {"name": "raw", "digest": raw["sha256"], "source": raw["source"], "rows": raw.get("rows")}
        card = folder.parent / CARD.name / "report.json"
        report = read_json(card) if card.exists() else {}
        for split in ("train", "eval"):
            if (file := folder / f"{split}.parquet").exists():
                rows = report.get("pairs", {}).get(split)
                about = {"source": report.get("source", str(file)), "rows": rows}
                yield {"name": split, "digest": known_sha256(file), **about}


def curves(root: Path = Path()) -> dict[int, dict[str, float]]:
    """data/metrics/train.csv: the values of each logged training step."""
    file = root / METRICS / "train.csv"
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {int(row.pop("step")): {name: float(value) for name, value in row.items() if value} for row in rows}


def _log_missing(run: Run, steps: Mapping[int, Mapping[str, float]]) -> None:
    """Curves of a training that this run did not execute itself: steps that its own `train` logged are left out."""
    logged = _last_step(run.folder / "train.jsonl")
    run.logged = {name: max(run.logged.get(name, -1), logged.get(name, -1)) for name in {**run.logged, **logged}}
    for step, values in steps.items():
        run.metrics(step, values)


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
    lines = [_parsed(line) for line in whole.splitlines()]
    return [line for line in lines if line is not None], offset + len(whole)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:  # the half that a killed stage left behind
        return None


def _half_a_line(journal: Path) -> bool:
    with journal.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def _last_step(journal: Path) -> dict[str, int]:
    steps: dict[str, int] = {}
    for line in read_lines(journal)[0]:
        if line["kind"] == "metrics":
            steps.update(dict.fromkeys(line["values"], line["step"]))
    return steps


def sent(folder: Path, stage: str) -> int:
    """How many bytes of a journal have been sent."""
    return int(recall(folder / f"{stage}.sent.json").get("offset", 0))  # a line that is sent twice is there once


def unsent(folder: Path) -> bool:
    """Whether whole lines of a journal wait."""
    return any(read_lines(path, known)[1] > known for path, known in _known(folder))


def _known(folder: Path) -> list[tuple[Path, int]]:
    return [(path, sent(folder, path.stem)) for path in folder.glob("*.jsonl")]


def start_forwarder(folder: Path) -> "subprocess.Popen[bytes]":
    """Start the process that sends this run's journals; where one is at work, the new one ends at once."""
    (folder / ERROR).unlink(missing_ok=True)
    command = [sys.executable, "-m", "tasks.tracking.forward", str(folder)]
    # A session of its own, without the mark by which a stage's processes are ended: the forwarder still has to say so.
    # It logs in as itself: the registry is none of its business.
    left_out = ("DPO_FAMILY", "DPO_MLFLOW_WRITER_PASSWORD")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    with (folder / "forward.log").open("a") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=env
        )


def wait_until_sent(run: Run, forwarder: "subprocess.Popen[bytes]") -> None:
    """So long as a server that answers needs, and no longer: whoever comes next sends what is left."""
    until = time.monotonic() + (LATER_SECONDS if (run.folder / SLOW).exists() else PATIENCE_SECONDS)
    while sent(run.folder, run.stage) < run.journal.stat().st_size:
        error, ended = run.folder / ERROR, _nobody_sends(run.folder, forwarder)
        if error.exists() or ended:
            _warn(f"MLflow could not be reached; the figures of {run.stage} are kept in {run.folder}", _why(error))
            return
        if time.monotonic() > until:
            (run.folder / SLOW).touch()
            _warn(f"MLflow is slow; the figures of {run.stage} are still being sent, and kept in {run.folder}", "")
            return
        time.sleep(0.1)


def _nobody_sends(folder: Path, forwarder: "subprocess.Popen[bytes]") -> bool:
    """Whether the forwarder ended (the disk is full, somebody killed it) and no other one has its work."""
    if forwarder.poll() is None:
        return False
    with locked(folder / "forward.lock", wait=False) as mine:
        return mine


def _why(error: Path) -> str:
    """What the forwarder left as a reason, a full disk as the sentence that says which."""
    said = _text(error)
    if said or not disk.is_full():
        return said or f"The process that sends them ended; see {error.with_name('forward.log')}."
    return disk.full()


def _warn(what: str, why: str) -> None:
    also = f" It said: {why}" if why else ""
    sentence = f"warning: {what}. The next run sends what is left, or `make sync`.{also}"
    print(redact(sentence), file=sys.stderr, flush=True)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except FileNotFoundError:  # the forwarder got through after all
        return ""


def wait_for_run(folder: Path) -> None:
    """Until MLflow has given the pipeline run its id, or will not."""
    until = time.monotonic() + (LATER_SECONDS if (folder / SLOW).exists() else PATIENCE_SECONDS)
    while not (folder / "run.json").exists() and not (folder / ERROR).exists() and time.monotonic() < until:
        time.sleep(0.1)
