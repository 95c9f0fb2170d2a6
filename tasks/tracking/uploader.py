"""Sends journals to MLflow, in a separate process: `python -m tasks.tracking.uploader RUN_FOLDER`.

If infra/cluster.yaml names a project of Weights & Biases, that project gets a copy (wandb_mirror.py).
`dpo sync` (`sync`) sends the unsent lines of all runs.
"""

import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tasks.config.cluster import load_cluster
from tasks.config.paths import main_checkout
from tasks.secrets.redact import redact
from tasks.system import disk
from tasks.system.files import read_json, write_json, write_text
from tasks.system.lock import file_lock
from tasks.system.processes import is_alive
from tasks.tracking import wandb_mirror
from tasks.tracking.journal import StageJournal
from tasks.tracking.journal_reader import Line, included_folder, read_journal, read_lines, read_run, sent, unsent
from tasks.tracking.mlflow_client import ERROR, limit_waiting, log_in
from tasks.tracking.mlflow_writer import open_store, record

LOCK = "upload.lock"  # in the run's folder; its uploader holds it
TAIL = 4096  # bytes of a journal that hold its last lines
IDLE_SECONDS = 10.0  # more than DVC takes between two stages
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two tries while the store fails


def follow(folder: Path) -> bool:
    """Send the run's journals as they grow, until the run is closed or idle; returns whether everything was sent."""
    pending = True
    while pending:
        with file_lock(folder / LOCK, wait=False) as acquired:
            if not acquired:
                return False
            with wandb_mirror.mirrored(folder):
                if not _follow(folder):
                    return False
        pending = unsent(folder)  # a stage that started while we decided to end found the lock taken
    return True


def _follow(folder: Path) -> bool:
    """While a stage runs, retry a failing store at growing intervals; after the last stage has ended, once."""
    stages, pause = UnfinishedStages(folder), FIRST_PAUSE
    active = retry_at = time.monotonic()
    while time.monotonic() < active + IDLE_SECONDS:
        working = stages.any_running()
        if working:
            active = time.monotonic()
        if not working or time.monotonic() >= retry_at:
            try:
                new = send_new(folder)
            except Exception as error:
                _note(folder, error)
                if not working:
                    return False
                retry_at, pause = time.monotonic() + pause, min(2 * pause, LONGEST_PAUSE)
            else:
                pause = FIRST_PAUSE
                (folder / ERROR).unlink(missing_ok=True)
                if any(line["kind"] == "close" for line in new):
                    return True
                active = time.monotonic() if new else active
        time.sleep(0.3)
    return True


def _note(folder: Path, error: Exception) -> None:
    """Write the error to a file that the stage reads, and its traceback to the log."""
    message = disk.explain(error) or (str(error).splitlines() or [type(error).__name__])[0][:300]
    with suppress(OSError):  # the log's disk may be the full one
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
        write_text(folder / ERROR, redact(message))


class UnfinishedStages:
    """The stages of a run whose journal has a start and no end after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets: dict[Path, int] = {}
        self.starts: dict[Path, dict[str, Any]] = {}  # by journal

    def any_running(self) -> bool:
        """Whether a stage still runs. Ends the journals of killed stages."""
        killed = self.killed()
        for path in killed:
            journal = StageJournal(self.folder, path.stem)
            if folder := read_journal(path)[1].folder:
                journal.end_include(included_folder(path, folder))
            journal.write("end", status="KILLED")
        return len(self.starts) > len(killed)

    def killed(self) -> list[Path]:
        """The journals of the stages that were killed."""
        for journal in sorted(self.folder.glob("*.jsonl")):
            lines, self.offsets[journal] = read_lines(journal, self.offsets.get(journal, 0))
            for line in lines:
                if line["kind"] == "start":
                    self.starts[journal] = line
                elif line["kind"] == "end":
                    self.starts.pop(journal, None)
        return [journal for journal, start in self.starts.items() if not is_alive(start)]


def send_new(folder: Path) -> list[Line]:
    """Send and return the lines of each journal that have not been sent."""
    if not (new := read_run(folder, partial(sent, folder))):
        return []
    log_in(read_json(folder / "settings.json")["tracking_uri"], "forwarder")
    client = open_store(folder)
    for stage, (lines, position) in new.items():
        record(client, folder, stage, lines)
        write_json(folder / f"{stage}.sent.json", asdict(position))
    return [line for lines, _ in new.values() for line in lines]


def send_all(runs: Path, skip: Path | None = None, patience: float = 15.0) -> tuple[int, dict[str, str]]:
    """Send the unsent lines of earlier runs, and end the journals of runs that were killed with their uploader.

    Returns how many runs were sent, and the reasons of those that failed.
    """
    done, failed = 0, {}
    deadline = time.monotonic() + patience  # an uploader that failed or was killed is about to end
    for folder in sorted(path for path in runs.glob("*/") if path != skip and (unsent(path) or _has_no_end(path))):
        stages = UnfinishedStages(folder)
        while is_sending(folder) and (unsent(folder) or stages.killed()) and time.monotonic() < deadline:
            time.sleep(0.2)
        with file_lock(folder / LOCK, wait=False) as acquired:
            if not acquired or not (folder / "settings.json").exists():
                continue  # its own uploader is running
            stages.any_running()  # ends the journals of stages that were killed
            if not unsent(folder):
                continue
            try:
                send_new(folder)
                (folder / ERROR).unlink(missing_ok=True)
                done += 1
            except Exception as error:
                _note(folder, error)
                failed[folder.name] = (folder / ERROR).read_text() if (folder / ERROR).exists() else str(error)
    return done, failed


def is_sending(folder: Path) -> bool:
    """Whether an uploader is working on the run."""
    with file_lock(folder / LOCK, wait=False) as acquired:
        return not acquired


def _has_no_end(folder: Path) -> bool:
    """Whether a stage is running, or was killed with its uploader (by a full disk, say)."""
    ends = [read_lines(path, max(0, path.stat().st_size - TAIL))[0][-1:] for path in folder.glob("*.jsonl")]
    return not all(end and end[0]["kind"] in ("end", "close") for end in ends)


def sync() -> bool:
    """Send the unsent lines of all runs, for `dpo sync`; returns whether everything was sent."""
    limit_waiting()
    runs = main_checkout() / load_cluster().logging_dir
    done, failed = send_all(runs)
    print(f"sent the metrics of {done} run{'' if done == 1 else 's'}")
    for folder in (path for path in sorted(runs.glob("*/")) if unsent(path) and path.name not in failed):
        print(f"note: another process is sending {folder.name}")
    for name, reason in failed.items():
        print(f"error: MLflow still refuses {name}: {reason} Start it (`dpo up`), then `dpo sync`.")
    not_mirrored = wandb_mirror.send_all(runs)
    if not_mirrored:
        names = ", ".join(not_mirrored)
        print(f"error: {names} did not reach Weights & Biases, for the reason above; `dpo sync` tries again.")
    return not failed and not not_mirrored


def main() -> None:
    """The uploader process of one run: its folder is the argument."""
    limit_waiting()
    folder = Path(sys.argv[1])
    if not follow(folder):
        sys.exit(1)
    send_all(folder.parent, skip=folder, patience=0.0)  # the server answers: send what earlier runs could not


if __name__ == "__main__":
    main()
