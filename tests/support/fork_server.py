"""Forks processes that start with our libraries imported: python -m tests.support.fork_server, started by `serve`.

tests/support/site/sitecustomize.py sends the commands. A forked process has its caller's command, environment, folder
and open files. It is killed when its caller is killed, and `family` finds it by the caller's id.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

# Not Ray, which reads its settings when it is imported.
LIBRARIES = ["aiohttp", "datasets", "deepspeed", "google.protobuf", "grpc", "matplotlib.pyplot", "mlflow", "pandas"]
LIBRARIES += ["jsonschema", "peft", "psutil", "pyarrow.fs", "pyarrow.parquet", "pydantic.v1", "rich.live"]
LIBRARIES += [
    "rich.progress",
    "safetensors.torch",
    "tensorboardX",
    "transformers",
    "transformers.models.llama.modeling_llama",
]
LIBRARIES += ["deepspeed.runtime.zero.muon.muon_optimizer", "mlflow.store.tracking.sqlalchemy_store"]  # imported late
DVC = [f"dvc.{name}" for name in ("_debug", "cachemgr", "cli.parser", "data_cloud", "lock", "rwlock", "scm")]
DVC += [f"dvc.repo.{name}" for name in ("artifacts", "checkout", "datasets", "params", "plots", "reproduce", "status")]
DVC += ["configobj", "dulwich.ignore", "dulwich.index", "dulwich.repo", "dvc.dirs", "dvc.stage.cache", "ruamel.yaml"]
DVC += ["dvc.utils.strictyaml", "dvc_data.hashfile.status", "dvc_data.index.checkout", "dvc_render.vega"]
# Of a flow with dummy stages, also one that a worker starts.
FLOW = [*DVC, "jinja2", "mlflow", "mlflow.store.tracking.sqlalchemy_store", "numpy", "pyarrow", "pydantic.v1"]
FLOW += ["prefect.cli.server", "prefect.server.api.server", "uvicorn.logging"]  # of the server
FLOW += ["matplotlib.backends.backend_svg", "rich.progress", "sqlalchemy.dialects.sqlite", "typer"]  # and its report
FLOW += [
    "prefect",
    "prefect.artifacts",
    "prefect.deployments",
    "prefect.flow_engine",
    "prefect.main",
    "prefect.runner._workspace_resolver",
    "prefect.runner._workspace_starter",
    "prefect.task_engine",
    "prefect.utilities.visualization",
]
OF_PREFECT = ("cli", "prefect", "services", "uvicorn")  # commands
SITE, PROJECT = Path(__file__).parent / "site", Path(__file__).parents[2]
ADDRESS, OF_FLOWS, OF_STAGES = "FORK_SERVER", "FORK_SERVER_OF_FLOWS", "FORK_SERVER_OF_STAGES"
REFUSED = "refused"  # a file beside the socket
FREE = 500  # numbers of files from here on are free
NAMESPACES = {"net": 0x40000000, "mnt": 0x00020000}


def serve() -> None:
    """Start the fork servers of this test session, which import nothing before the first command."""
    from services import SETTINGS
    from tasks.system.environment import QUIET

    if OF_FLOWS in os.environ:  # those of the process that started this one
        return
    os.environ[OF_FLOWS] = start(FLOW, {**SETTINGS, **clean_environment()})
    if QUIET["DS_ACCELERATOR"] != "cpu":  # CUDA, which an import may start, survives no fork
        return
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    address = start([*LIBRARIES, *DVC], {**QUIET, "OMP_NUM_THREADS": "1", **os.environ})
    os.environ.update({ADDRESS: address, "PYTHONPATH": path})


def clean_environment() -> dict[str, str]:
    """Ours without the variables of Prefect and of a run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DPO_"))}


def start(libraries: list[str], env: dict[str, str]) -> str:
    """Start a fork server with these libraries, which ends with this process; its address."""
    folder = Path(tempfile.mkdtemp(prefix="dpo-fork-"))
    env = {name: value for name, value in env.items() if name != ADDRESS} | {"PYTHONPATH": str(PROJECT)}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(100)
        command = [sys.executable, "-m", "tests.support.fork_server", str(folder), str(listener.fileno()), *libraries]
        options: dict[str, Any] = {"cwd": folder, "env": env, "stdin": subprocess.PIPE}
        server = subprocess.Popen(command, pass_fds=[listener.fileno()], **options)

    def end() -> None:
        assert server.stdin
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return str(folder / "socket")


def warm(address: str) -> None:
    """Let a fork server import now."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(address)


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants, with those that were forked for them."""
    folder, found, unseen = Path(os.environ.get(ADDRESS, "none")).parent, [], [pid]
    children: dict[int, list[int]] = {}  # of all processes: psutil would read them once for each of the family
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process.pid)
    while unseen:
        with suppress(psutil.Error):
            process = psutil.Process(unseen.pop())
            found.append(process)
            unseen += children.get(process.pid, [])
        with suppress(OSError, ValueError):  # not there, or not yet written
            unseen.append(int((folder / str(found[-1].pid)).read_text()))
    return found


class Server:
    def __init__(self, folder: Path, listener: socket.socket, libraries: list[str]) -> None:
        self.folder, self.listener, self.libraries = folder, listener, libraries
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.selector.register(0, selectors.EVENT_READ, self.end)  # the tests are over
        self.children: dict[int, tuple[socket.socket, int, int]] = {}  # caller, its id and the process's file, by id

    def next_request(self) -> tuple[dict[str, Any], list[int]]:
        """Returns in each forked process, with its request and files."""
        while True:
            for key, _ in self.selector.select():
                if (request := key.data()) is not None:
                    return request

    def accept(self) -> tuple[dict[str, Any], list[int]] | None:
        for name in self.libraries:
            importlib.import_module(name)
        for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]  # torch's take 0.1 s at each exit
            finalizer.atexit = False
        gc.freeze()  # the forked processes share what is there
        caller, _ = self.listener.accept()
        size, files, _, _ = socket.recv_fds(caller, 8, 253)
        request = json.loads(caller.makefile("rb").read(struct.unpack("q", size)[0]) if size else "{}")
        if not request or (other := _other_settings(request)):
            if request:
                with (self.folder / REFUSED).open("a") as file:
                    file.write(" ".join(other) + "\n")
            caller.close()
            _close(files)
            return None
        caller_pid, *_ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if (pid := os.fork()) == 0:
            self.close()
            caller.close()
            return {**request, "caller": caller_pid}, files
        _close(files)
        (self.folder / str(caller_pid)).write_text(str(pid))
        self.children[pid] = caller, caller_pid, os.pidfd_open(pid)
        self.selector.register(self.children[pid][2], selectors.EVENT_READ, lambda: self.report(pid))
        self.selector.register(caller, selectors.EVENT_READ, lambda: self.kill(pid))
        caller.sendall(struct.pack("q", pid))
        return None

    def kill(self, pid: int) -> None:
        """Its caller is gone."""
        if pid in self.children:
            self.selector.unregister(self.children[pid][0])
            os.kill(pid, signal.SIGKILL)

    def report(self, pid: int) -> None:
        """It has ended: its caller ends in the same way."""
        caller, caller_pid, file = self.children.pop(pid)
        _, status = os.waitpid(pid, 0)
        self.selector.unregister(file)
        os.close(file)
        with suppress(KeyError):
            self.selector.unregister(caller)
        (self.folder / str(caller_pid)).unlink()
        with caller, suppress(OSError):
            caller.sendall(struct.pack("q", status))

    def end(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def close(self) -> None:
        """In a forked process."""
        self.selector.close()
        self.listener.close()
        for caller, _, file in self.children.values():
            caller.close()
            os.close(file)


def _other_settings(request: dict[str, Any]) -> list[str]:
    """The variables with which the libraries would be others if the caller imported them."""
    names = [name for name in request["environ"] if re.search(request["at_import"], name)]
    return [name for name in names if request["environ"][name] != os.environ.get(name, "")]


def refusals() -> Counter[str]:
    """How many processes of this test session had to import for themselves, by the variables that they had set."""
    path = Path(os.environ.get(ADDRESS, "none")).parent / REFUSED
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()


def with_torch(env: dict[str, str]) -> dict[str, str]:
    """An environment whose stages are forked from the server of the test session, for real ones."""
    return {**env, OF_STAGES: os.environ[ADDRESS]} if ADDRESS in os.environ else fresh(env)


def fresh(env: dict[str, str]) -> dict[str, str]:
    """An environment in which every process starts a new interpreter, for tests that kill them."""
    return {name: value for name, value in env.items() if name not in (ADDRESS, "FORK_STAGES")}


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def become(request: dict[str, Any], files: list[int]) -> None:
    """Take over what a process inherits."""
    os.setsid()
    _enter_namespaces(request["caller"])
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE) for file in files]
    _close(files)
    for number, file in zip(request["files"], moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    # Tests in the background have Ctrl-C switched off, and the fork server with them.
    signal.signal(signal.SIGINT, signal.default_int_handler if request["ctrl_c"] else signal.SIG_IGN)
    if "".join(request["command"][1:2]).partition(".")[0] in OF_PREFECT:  # others would log as it says
        _set_prefect(request["environ"])
    os.environ.clear()
    os.environ.update(request["environ"])
    _set_hub()
    unbuffered = request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=unbuffered)  # type: ignore[union-attr]


def _enter_namespaces(caller: int) -> None:
    """Of a caller on another network or with other mounts."""
    for name, kind in NAMESPACES.items():
        if os.readlink(f"/proc/{caller}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            with open(f"/proc/{caller}/ns/{name}") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), kind):
                    raise OSError(ctypes.get_errno(), "setns", name)


def _set_hub() -> None:
    """What the Hub's libraries read from the environment at import, and from their own modules since."""
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_UPDATE_CHECK"):
        for library in ("huggingface_hub.constants", "datasets.config"):
            if name in os.environ and hasattr(module := sys.modules.get(library), name):
                setattr(module, name, os.environ[name].upper() in ("1", "ON", "YES", "TRUE"))


def _set_prefect(environ: dict[str, str]) -> None:
    """Prefect's settings: those of the caller and, where it has none, ours, which services/__init__.py would set."""
    if context := sys.modules.get("prefect.context"):
        os.environ.update({name: value for name, value in environ.items() if name.startswith("PREFECT_")})
        context.refresh_global_settings_context()  # reads prefect.toml in this folder, too
        importlib.import_module("prefect.logging.configuration").setup_logging()


class Replaced(BaseException):
    """A forked process goes on as this script of Ray's, which it has imported."""

    def __init__(self, command: list[str], path: list[str]) -> None:
        self.command, self.path = command, path


def _replace_ray_worker(request: dict[str, Any]) -> None:
    """Ray's setup_worker.py sets variables and starts default_worker.py by `exec`: no second fork and import of Ray."""
    execvp, before, folder = os.execvp, dict(os.environ), Path(sys.executable).parent.resolve()
    pattern = rf"{request['at_import']}|^RAY_(?!TRAIN_)"  # the latter what Ray itself reads

    def replace(file: str, args: list[str]) -> None:
        start, python, *command = shlex.split(args[-1])
        old, new = (env.get("PYTHONPATH", "").split(os.pathsep) for env in (before, os.environ))
        changed = {name for name, _ in before.items() ^ os.environ.items() if re.search(pattern, name)}
        ours = start == "exec" and Path(python).parent.resolve() == folder
        if changed or not ours or request["path"][: len(old)] != old:
            execvp(file, args)
        of_ray = [name for name in sys.path if name.endswith("thirdparty_files")]  # since its import
        raise Replaced(command, [*of_ray, *new, *request["path"][len(old) :]])

    os.execvp = replace  # type: ignore[assignment]


def run(command: list[str], path: list[str], cwd: str) -> int:
    """Run it as Python runs its command line; its exit code."""
    try:
        try:
            _run(command, path, cwd)
        except Replaced as replaced:
            _run(replaced.command, replaced.path, cwd)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end(code: int) -> None:
    """As Python ends, without the seconds that it takes to delete all modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(command: list[str], path: list[str], cwd: str) -> None:
    kind, *rest = command
    if kind == "-m":
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # `prefect.engine`
        sys.argv, sys.path[:] = rest, [cwd, *path]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *path]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], main.__dict__)
    else:
        sys.argv, sys.path[:] = command, [str(Path(kind).parent), *path]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    server = Server(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
    request, files = server.next_request()
    become(request, files)
    if request["command"][0].endswith("/ray/_private/workers/setup_worker.py"):
        _replace_ray_worker(request)
    end(run(request["command"], request["path"], request["cwd"]))
