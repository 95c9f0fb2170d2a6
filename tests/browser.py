"""A real Chromium, driven over its DevTools protocol: open a page, wait for what it shows, ask it, take its picture."""

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from flows import child

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
)
PATIENCE = 180.0  # seconds; a page of a busy server takes its time


def chromium() -> str:
    """Where it is; a test without one is skipped and says so."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is on the PATH")
    return found


class Page:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.number = socket, 0
        self.call("Page.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": given}))
        while True:
            answer = json.loads(self.socket.recv(timeout=PATIENCE))
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, address: str, width: int = 1600, height: int = 1400) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self) -> str:
        return str(self.ask("document.body ? document.body.innerText : ''"))

    def shows(self, *texts: str) -> str:
        """Wait until the page shows all of these at once; the whole text that it showed then."""
        until = time.monotonic() + PATIENCE
        while missing := [text for text in texts if text not in (shown := self.text())]:
            assert time.monotonic() < until, f"the page does not show {missing}; it shows:\n{shown}"
            time.sleep(0.3)
        return shown

    def until(self, expression: str, expected: Any) -> None:
        """Wait until a JavaScript expression has this value: a page renders its parts one by one, and again."""
        deadline = time.monotonic() + PATIENCE
        while (value := self.ask(expression)) != expected:
            assert time.monotonic() < deadline, f"{expression} is {value!r}, not {expected!r}"
            time.sleep(0.3)

    def click(self, text: str) -> None:
        """On the innermost thing that shows just this."""
        find = f"[...document.querySelectorAll('*')].filter(e => e.innerText?.trim() === {json.dumps(text)}).at(-1)"
        until = time.monotonic() + PATIENCE
        while not self.ask(f"!!({find})"):
            assert time.monotonic() < until, f"the page has no {text!r}"
            time.sleep(0.3)
        self.ask(f"{find}.click()")

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A fresh one with one page, ended with the block."""
    command = [chromium(), *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    profile.mkdir(parents=True, exist_ok=True)
    with (
        (profile / "chromium.log").open("w") as log,
        child.started(command, profile, os.environ, log) as process,
        connect(_socket(process, profile), max_size=None, open_timeout=PATIENCE) as socket,
    ):
        yield Page(socket)


def _socket(process: subprocess.Popen[str], profile: Path) -> str:
    """The address of the page's socket."""
    file, until = profile / "DevToolsActivePort", time.monotonic() + PATIENCE
    while not file.exists() or not file.read_text().strip():
        assert process.poll() is None, (profile / "chromium.log").read_text()
        assert time.monotonic() < until, "Chromium did not start"
        time.sleep(0.1)
    port = file.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
        return str(next(page["webSocketDebuggerUrl"] for page in json.load(answer) if page["type"] == "page"))
