"""Whether a server answers, and the wait until it does: those of `dpo up`, embedded ones, engines, the arena."""

import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tasks.errors import UserError

REPORT_INTERVAL = 10.0  # seconds between messages while waiting
LAST_LINES = 15  # of a log, in an error


def is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:  # an HTTP error is an OSError too
        return bool(response.status == 200)
    return False


def wait_until_healthy(
    url: str, failure: str, log: Path, is_alive: Callable[[], bool], timeout: float, *, waiting_for: str = ""
) -> None:
    """UserError with `failure` and the end of the log if the server ends, or does not answer in time."""
    began = reported = time.monotonic()
    while not is_healthy(url):
        now = time.monotonic()
        if not (alive := is_alive()) or now - began > timeout:
            reason = f"no answer within {timeout:.0f} s" if alive else "its process exited"
            raise UserError(f"{failure}: {reason}. The end of its log, {log}:\n{tail(log)}")
        if waiting_for and now - reported > REPORT_INTERVAL:
            print(f"  {waiting_for}: not ready after {now - began:.0f} s, still waiting", flush=True)
            reported = now
        time.sleep(0.2)


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def rotate(log: Path) -> Path:
    """Keep the log of the last start beside the new one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    return log
