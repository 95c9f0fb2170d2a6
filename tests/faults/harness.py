"""One command under a fault, then the same command again: what must hold afterwards, and how it is looked at.

`Harness` compiles preload.c, keeps the fork server of forks.py, and runs a command with the N-th durable operation
below a folder killed, refused for lack of space (ENOSPC) or broken (EIO), or a connection to a server dropped.
"""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tasks.tracking.journal_reader import unsent
from tests.faults.forks import NAME, UPLOADER

PROJECT = Path(__file__).resolve().parents[2]
FAULTS = {"kill": 1, "enospc": 2, "eio": 3, "drop": 4}
STATE = struct.Struct("7q256s1024s")  # as in preload.c: at, kind, group, count, fired, port, matched, only, root
PATIENCE = 240.0  # seconds for a command
AFTERWARDS = 30.0  # seconds for what a command started to end by itself


@dataclass(frozen=True)
class Done:
    code: int
    said: str
    operations: int
    fired: bool
    trace: list[str]


class Harness:
    def __init__(self, folder: Path) -> None:
        """`folder` is for the harness's own files, beside what commands work in."""
        self.folder, self.state = folder, folder / "state"
        self.output = folder / "output"
        self.library = compiled(folder)
        self.server: subprocess.Popen[str] | None = None

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DPO_", "PREFECT_", "MLFLOW_", "FAULT_"))}
        return {
            **kept,
            "LD_PRELOAD": str(self.library),
            "FAULT_STATE": str(self.state),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(PROJECT),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_ALLOW_MODEL_CODE_EXECUTION": "false",
            "DO_NOT_TRACK": "1",
            "DVC_NO_ANALYTICS": "1",
            **homes(self.folder),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "OMP_NUM_THREADS": "1",
        }

    def run(
        self,
        root: Path,
        module: str,
        arguments: Sequence[str] = (),
        *,
        fault: str = "",
        at: int = 0,
        forked: bool = True,
        env: Mapping[str, str] | None = None,
        port: int = 0,
        only: str = "",
    ) -> Done:
        """Run `python -m module` in `root`; with a fault, its `at`-th durable operation below `root` has it.

        What goes to and comes from a server at `port` of this machine counts as an operation, too. `only` names
        operations as the trace does, with wildcards ("write /data/*.arrow"): the `at`-th of those is meant.
        """
        self.state.write_bytes(STATE.pack(at, FAULTS.get(fault, 0), 0, 0, 0, port, 0, only.encode(), os.fsencode(root)))
        for path in (self.output, Path(f"{self.state}.trace")):
            path.unlink(missing_ok=True)
        given = {**self.environment(), **(env or {})}
        code = self._forked(root, module, arguments, given) if forked else self._started(root, module, arguments, given)
        _, _, _, count, fired, *_ = STATE.unpack(self.state.read_bytes())
        trace = Path(f"{self.state}.trace")
        lines = trace.read_text(errors="replace").splitlines() if trace.exists() else []
        return Done(code, self.output.read_text(errors="replace"), count, bool(fired), lines)

    def _forked(self, root: Path, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> int:
        server = self.server or self._serve()
        request = {"module": module, "arguments": list(arguments), "cwd": str(root), "env": dict(env)}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({**request, "output": str(self.output), "patience": PATIENCE}) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    def _serve(self) -> subprocess.Popen[str]:
        """The server itself works in another folder, so that nothing of its own is counted."""
        self.state.write_bytes(bytes(STATE.size)) if not self.state.exists() else None
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tests.faults.forks"]
        env = self.environment()
        self.server = subprocess.Popen(command, cwd=PROJECT, env=env, stdin=pipe, stdout=pipe, text=True)
        assert self.server.stdout is not None
        while self.server.stdout.readline() != "ready\n":  # libraries have their say
            assert self.server.poll() is None, "the fork server did not start"
        return self.server

    def _started(self, root: Path, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> int:
        with self.output.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", LEAD, module, *arguments],
                cwd=root,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                return process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return 124

    def leftovers(self, root: Path | None = None) -> list[str]:
        """Processes that the command started and that do not end by themselves; they are ended here.

        With `root`, a uploader that has sent all that there is need not wait for more first.
        """
        until = time.monotonic() + AFTERWARDS
        if root and not any(unsent(path.parent) for path in root.glob(".scratch/runs/*/settings.json")):
            for process in [one for one in self._family() if one.name() == NAME or UPLOADER in one.cmdline()]:
                process.kill()
        while (left := self._family()) and time.monotonic() < until:
            time.sleep(0.1)
        said = [" ".join(process.cmdline())[:120] for process in left if process.is_running()]
        for process in left:
            process.kill()
        return said

    def _family(self) -> list[psutil.Process]:
        mark, spared = str(self.state), {os.getpid(), self.server.pid if self.server else 0}
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.pid not in spared and process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get("FAULT_STATE") == mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def close(self) -> None:
        if self.server:
            assert self.server.stdin is not None
            self.server.stdin.close()
            self.server.wait()
        self.leftovers()


LEAD = """
import os, sys, runpy
from tests.faults.forks import _note_group
_note_group()
sys.path[0] = os.getcwd()
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def homes(folder: Path) -> dict[str, str]:
    """Where commands keep what is of a user, who owns what a scenario starts from and what a command makes of it."""
    names = {"DVC_SITE_CACHE_DIR": "site", "PREFECT_HOME": "prefect", "XDG_CONFIG_HOME": "config"}
    return {variable: str(folder / name) for variable, name in names.items()}


def compiled(folder: Path) -> Path:
    library = folder / "preload.so"
    source = Path(__file__).with_name("preload.c")
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


@contextmanager
def harness(folder: Path) -> Iterator[Harness]:
    folder.mkdir(parents=True, exist_ok=True)
    made = Harness(folder)
    try:
        yield made
    finally:
        made.close()


LEFT_BEHIND = re.compile(r"(^|/)\.[^/]+\.(\d+|[0-9a-f]{8})(/|$)|\.tmp$")  # how files that are not whole yet are called


def locks(root: Path) -> list[str]:
    """Locks and half-made files that stay when nobody works any more."""
    found = [str(path.relative_to(root)) for path in root.rglob("*.lock") if ".git" in path.parts]
    found += [str(path.relative_to(root)) for path in root.rglob("*-journal")]
    for path in root.rglob("rwlock"):
        if path.read_text().strip() not in ("", "{}"):
            content = json.loads(path.read_text())
            found += [str(path.relative_to(root))] if any(content.values()) else []
    names = (str(path.relative_to(root)) for path in root.rglob(".*"))
    return found + [name for name in names if LEFT_BEHIND.search(name)]


def copy(source: Path, target: Path) -> None:
    """Make `target` the same as `source`; a database stays there all the time, since a server may look at it."""
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):
                path.rmdir()
        elif path.name != "mlflow.db":
            path.unlink(missing_ok=True)
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=_replace)


def _replace(source: str, target: str) -> None:
    shutil.copy2(source, f"{target}~", follow_symlinks=False)
    os.replace(f"{target}~", target)
