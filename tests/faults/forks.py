"""Runs commands of ours in forks of one process that has imported the large libraries: a tenth of the time of each.

`python -m tests.faults.forks` reads one JSON line a command ({"module", "arguments", "cwd", "env", "output",
"patience"}) and answers with its exit status: negative for a signal, 124 after `patience` seconds. A fork is as good as
a new process: its own session, no file but its output, and none of our own modules imported yet. The uploader, which a
stage starts, is forked as well.
"""

import importlib
import json
import mmap
import os
import runpy
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LARGE: tuple[str, ...] = (
    "mlflow",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "pandas",
)
LARGE += ("pyarrow.parquet", "torch", "transformers", "peft", "pydantic", "psutil", "matplotlib.pyplot", "yaml")
UPLOADER = "tasks.tracking.uploader"
NAME = "uploader"  # of its forked process: the command line is ours
GROUP = 2 * 8  # where `group` stands in preload.c's struct state

Popen = subprocess.Popen
OURS = ("cli", "flows", "services", "tasks", "training", "tests")


class ForkingPopen(Popen):  # type: ignore[type-arg]
    """Fork for the uploader instead of starting a new interpreter; everything else as usual. A class: our code
    writes `subprocess.Popen[str]`."""

    def __new__(cls, command: Any, **options: Any) -> Any:
        if not isinstance(command, list) or command[:3] != [sys.executable, "-m", UPLOADER]:
            return super().__new__(cls)
        request = {"module": UPLOADER, "arguments": command[3:], "cwd": os.getcwd(), "env": options.get("env")}
        pid = os.fork()
        if pid == 0:
            run(request, options["stdout"].fileno())
        return Forked(pid)


class Forked:
    """What the starter of a uploader asks about it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(done[1])
        return self.returncode


def run(request: dict[str, Any], output: int) -> None:
    """In the fork: become the command. Never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, 1024)  # locks of the process that forked are not ours
        os.chdir(request["cwd"])
        if request["env"] is not None:
            os.environ.clear()
            os.environ.update(request["env"])
        sys.argv = [request["module"], *request["arguments"]]
        sys.orig_argv[:] = [sys.executable, "-m", *sys.argv]
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[0] = request["cwd"]
        if request["module"] == UPLOADER:
            Path("/proc/self/comm").write_text(NAME)
        else:
            _note_group()
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _note_group() -> None:
    """Whom preload.c kills."""
    with open(os.environ["FAULT_STATE"], "r+b") as file, mmap.mmap(file.fileno(), 0) as state:
        struct.pack_into("q", state, GROUP, os.getpgrp())


def _ended(pid: int, until: float) -> int:
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(done[1])


def main() -> None:
    for name in LARGE:
        importlib.import_module(name)
    subprocess.Popen = ForkingPopen  # type: ignore[assignment,misc]
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(request, os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        print(_ended(pid, time.monotonic() + request["patience"]), flush=True)


if __name__ == "__main__":
    main()
