"""The other half of tracking.py: journals to MLflow, in a process of its own.

`python -m tasks.tracking.forward` (`make sync`) sends whatever any run still has to send.
"""

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks import disk
from tasks.files import home, read_json, write_json, write_text
from tasks.machines.flock import locked
from tasks.machines.process import is_alive
from tasks.redact import redact
from tasks.tracking.journal import ERROR, read_lines, sent, unsent
from tasks.tracking.login import use
from tasks.tracking.record import record, store

IDLE_SECONDS = 10.0  # more than DVC takes between two stages
TAIL = 4096  # bytes of a journal that hold its last lines
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two tries while the store fails
# A store that is gone costs seconds: MLflow's own defaults are minutes a call.
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0.5",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def follow(folder: Path) -> bool:
    """Send the run's journals as they grow, until the run is closed or nobody writes any more; whether all went."""
    going_on = True
    while going_on:
        with locked(folder / "forward.lock", wait=False) as mine:
            if not mine:
                return False
            if not _follow(folder):
                return False
        going_on = unsent(folder)  # a stage that started while we decided to end found the lock taken
    return True


def _follow(folder: Path) -> bool:
    """A store that fails is asked again while a stage works, at longer and longer intervals."""
    workers, quiet_since, pause = Workers(folder), time.monotonic(), FIRST_PAUSE
    while time.monotonic() - quiet_since < IDLE_SECONDS:
        working = workers.any()
        try:
            new = send_new(folder)
        except Exception as error:
            note(folder, error)
            if not working:
                return False
            _rest(workers, pause)
            pause, quiet_since = min(2 * pause, LONGEST_PAUSE), time.monotonic()
            continue
        pause = FIRST_PAUSE
        (folder / ERROR).unlink(missing_ok=True)
        if any(line["kind"] == "close" for line in new):
            return True
        if new or working:
            quiet_since = time.monotonic()
        time.sleep(0.3)
    return True


def _rest(workers: "Workers", seconds: float) -> None:
    """So long, or until the last stage has ended: then there is one more try, and `make sync` need not wait for us."""
    until = time.monotonic() + seconds
    while workers.any() and time.monotonic() < until:
        time.sleep(0.3)


def note(folder: Path, error: Exception) -> None:
    """Where the stage sees it, and the whole of it in the log."""
    said = disk.explain(error) or (str(error).splitlines() or [type(error).__name__])[0][:300]
    with suppress(OSError):  # the log's disk may be the full one
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
        write_text(folder / ERROR, redact(said))


class Workers:
    """Which stages still write, by the last start or end in each journal; the journal of a killed one is ended here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets: dict[str, int] = {}
        self.last: dict[str, dict[str, Any]] = {}

    def any(self) -> bool:
        working = [self._works(path) for path in sorted(self.folder.glob("*.jsonl"))]  # each is looked at
        return any(working)

    def killed(self) -> bool:
        """Whether a stage was killed and its journal has no end yet."""
        last = [self._last(path) for path in self.folder.glob("*.jsonl")]
        return any(line["kind"] == "start" and not is_alive(line) for line in last)

    def _last(self, journal: Path) -> dict[str, Any]:
        lines, self.offsets[journal.stem] = read_lines(journal, self.offsets.get(journal.stem, 0))
        for line in lines:
            if line["kind"] in ("start", "end"):
                self.last[journal.stem] = line
        return self.last.get(journal.stem, {"kind": "end"})

    def _works(self, journal: Path) -> bool:
        last = self._last(journal)
        if last["kind"] == "end":
            return False
        if is_alive(last):
            return True
        end = {"kind": "end", "time": int(time.time() * 1000), "status": "KILLED"}
        with journal.open("a") as file:
            file.write("\n" + json.dumps(end) + "\n")  # it may have died in the middle of a line
        return False


def send_new(folder: Path) -> list[dict[str, Any]]:
    """Send what has not been sent of each journal; these lines."""
    stages = [path.stem for path in sorted(folder.glob("*.jsonl")) if sent(folder, path.stem) < path.stat().st_size]
    if not stages:
        return []
    use(read_json(folder / "settings.json")["tracking_uri"], "forwarder")
    with store(folder) as client:
        return [line for stage in stages for line in _send(client, folder, stage)]


def _send(client: Any, folder: Path, stage: str) -> list[dict[str, Any]]:
    lines, offset = read_lines(folder / f"{stage}.jsonl", sent(folder, stage))
    record(client, folder, stage, lines)
    if offset > sent(folder, stage):
        write_json(folder / f"{stage}.sent.json", {"offset": offset})
    return lines


def send_all(runs: Path, but: Path | None = None, patience: float = 15.0) -> tuple[int, dict[str, str]]:
    """Send what earlier runs could not, and the end of those that were killed with their forwarder.

    How many there were, and those that failed, with why.
    """
    done, failed = 0, {}
    until = time.monotonic() + patience  # a forwarder that failed to reach MLflow, or was killed, is about to end
    for folder in sorted(path for path in runs.glob("*/") if path != but and (unsent(path) or _has_no_end(path))):
        workers = Workers(folder)
        while _held(folder) and (unsent(folder) or workers.killed()) and time.monotonic() < until:
            time.sleep(0.2)
        with locked(folder / "forward.lock", wait=False) as mine:
            if not mine or not (folder / "settings.json").exists():
                continue  # its own forwarder is at work
            workers.any()  # ends the journals of stages that were killed
            if not unsent(folder):
                continue
            try:
                send_new(folder)
                (folder / ERROR).unlink(missing_ok=True)
                done += 1
            except Exception as error:
                note(folder, error)
                failed[folder.name] = (folder / ERROR).read_text() if (folder / ERROR).exists() else str(error)
    return done, failed


def _has_no_end(folder: Path) -> bool:
    """Whether a stage is at work, or was killed with its forwarder, as by a full disk."""
    return any(_last_kind(path) not in ("end", "close") for path in folder.glob("*.jsonl"))


def _last_kind(journal: Path) -> str:
    lines, _ = read_lines(journal, max(0, journal.stat().st_size - TAIL))
    return str(lines[-1].get("kind")) if lines else ""


def _held(folder: Path) -> bool:
    with locked(folder / "forward.lock", wait=False) as mine:
        return not mine


def sync() -> None:
    from tasks.errors import UserError
    from tasks.params import load_cluster

    try:
        runs = home() / load_cluster().logging_dir
        done, failed = send_all(runs)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"sent the figures of {done} run{'' if done == 1 else 's'}")
    for folder in (path for path in sorted(runs.glob("*/")) if unsent(path) and path.name not in failed):
        print(f"note: {folder.name} has a process of its own that is sending")
    for name, why in failed.items():
        print(f"error: MLflow still refuses {name}: {why} Start it (`make up`), then `make sync`.")
    if failed:
        sys.exit(1)


def main() -> None:
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    if len(sys.argv) < 2:
        sync()
        return
    folder = Path(sys.argv[1])
    if not follow(folder):
        sys.exit(1)
    send_all(folder.parent, but=folder, patience=0.0)  # the store is there: what earlier runs could not send goes now


if __name__ == "__main__":
    main()
