"""A real Chromium, driven over its DevTools protocol: open a page, wait for its content, evaluate JavaScript, click."""

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

from tasks.system import processes

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
)
PATIENCE = 180.0  # seconds, for pages of a busy server


PATH = next(filter(None, map(shutil.which, NAMES)), None)
WITHOUT = f"needs Chromium: none of {', '.join(NAMES)} is on the PATH"
needed = pytest.mark.skipif(PATH is None, reason=WITHOUT)  # before the fixtures, which may start servers


def chromium() -> str:
    """The path of Chromium; without it the test is skipped with a reason."""
    return PATH or pytest.skip(WITHOUT)


class Page:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.number = socket, 0
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            response = json.loads(self.socket.recv(timeout=PATIENCE))
            if response.get("id") == self.number:
                assert "error" not in response, response
                return dict(response["result"])

    def open(self, address: str, width: int = 1600, height: int = 1400) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def text(self) -> str:
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def shows(self, *texts: str) -> str:
        """Wait until the page shows all of these texts at once. Returns the page's whole text."""
        until = time.monotonic() + PATIENCE
        while missing := [text for text in texts if text not in (shown := self.text())]:
            assert time.monotonic() < until, f"the page does not show {missing}; it shows:\n{shown}"
            time.sleep(0.3)
        return shown

    def until(self, expression: str, expected: Any) -> None:
        """Wait until a JavaScript expression has this value."""
        deadline = time.monotonic() + PATIENCE
        while (value := self.evaluate(expression)) != expected:
            assert time.monotonic() < deadline, f"{expression} is {value!r}, not {expected!r}"
            time.sleep(0.3)

    def click(self, text: str) -> None:
        """Click the innermost element whose whole text this is."""
        find = f"[...document.querySelectorAll('*')].filter(e => e.innerText?.trim() === {json.dumps(text)}).at(-1)"
        until = time.monotonic() + PATIENCE
        while not self.evaluate(f"!!({find})"):
            assert time.monotonic() < until, f"the page has no {text!r}"
            time.sleep(0.3)
        self.evaluate(f"{find}.click()")

    def press(self, key: str) -> None:
        """Press and release a key, such as `1` or `ArrowLeft`."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with a fresh profile and one page, stopped at the end of the block."""
    command = [chromium(), *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    profile.mkdir(parents=True, exist_ok=True)
    with (
        (profile / "chromium.log").open("w") as log,
        processes.spawn(command, profile, os.environ, log) as process,
        connect(_socket(process, profile), max_size=None, open_timeout=PATIENCE) as socket,
    ):
        yield Page(socket)


def _socket(process: subprocess.Popen[str], profile: Path) -> str:
    """The address of the page's DevTools socket."""
    file, until = profile / "DevToolsActivePort", time.monotonic() + PATIENCE
    while not file.exists() or not file.read_text().strip():
        assert process.poll() is None, (profile / "chromium.log").read_text()
        assert time.monotonic() < until, "Chromium did not start"
        time.sleep(0.1)
    port = file.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as response:
        return str(next(page["webSocketDebuggerUrl"] for page in json.load(response) if page["type"] == "page"))
