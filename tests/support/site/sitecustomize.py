"""Python imports this module when it starts. Processes that only wait for imports are forked by the fork server.

tests/support/fork_server.py has imported our libraries, which takes twelve seconds of a core. The process that was
started sends it the command, waits for the forked process, passes signals on, and ends as that one ends.
"""

import json
import os
import re
import signal
import socket
import struct
import sys
from contextlib import suppress

ADDRESS = "FORK_SERVER"  # a socket
OF_STAGES = "FORK_SERVER_OF_STAGES"  # another one, for all but `dpo` and DVC: a fork of a larger process costs more
STAGES = "FORK_STAGES"  # set: also `dpo`, the stages, scripts and servers; not where a test kills them
RUNS = "FORK_RUNS"  # a file: while it is there, also the runs of a Prefect worker; not where a test kills the worker
FORKED = re.compile(
    r"/ray/.*/((default|setup)_worker|dashboard|monitor|log_monitor|agent|agent/main)\.py$"
    r"|^deepspeed\.checkpoint\.ds_to_universal$"
    r"|^dvc$|^tasks\.(tracking\.uploader|cluster\.kept_ray)$|^tests\.support\.|^from multiprocessing\.spawn "
    r"|^import sys;exec\(eval\(sys\.stdin\.readline\(\)\)\)$"  # the processes of pytest-xdist
)
STAGE = re.compile(
    r"^(cli|tasks|mlflow|uvicorn|tasks\.tracking\.mlflow_server"
    r"|services\.prefect_sqlite|services\.provision|services\.serving\.sender|transformers\.cli\.transformers)$"
)
RUN = re.compile(r"^(prefect\.(runner\._workspace_supervisor|engine)|tasks fingerprint)( |$)")
# Libraries read these when they are imported. A process with other values than the fork server imports for itself.
AT_IMPORT = re.compile(
    r"^(?!PYTORCH_NVML_BASED_CUDA_CHECK$|HF_XET_HIGH_PERFORMANCE$"  # which libraries set in the process of the tests
    r"|HF_HUB_(OFFLINE|DISABLE_UPDATE_CHECK)$)"  # which the fork server can still set
    r"(CUDA|DS|DEEPSPEED|HF|HUGGINGFACE|OMP|MKL|PYTORCH|TORCH|TRANSFORMERS|DATASETS)_"
)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def command() -> list[str] | None:
    """[-m, MODULE, ARGUMENTS...], [-c, CODE, ...] or [SCRIPT, ...] of this interpreter, if it is one to fork."""
    given = sys.orig_argv[1:]
    while given and given[0].startswith(("-u", "-B", "-W")):  # multiprocessing passes on the options of its parent
        del given[0]
    target = given[1] if given[:1] in (["-m"], ["-c"]) and len(given) > 1 else given[0] if given else ""
    more = STAGES in os.environ and (given[:1] == ["-c"] or (given[:1] == ["-m"] and STAGE.search(target)))
    run = RUN.search(" ".join(given[1:3])) and os.path.exists(os.environ.get(RUNS, ""))
    deploys = target == "prefect" and "deploy" in given  # not a worker, which a test kills
    listed = FORKED.search(target) or more or run or deploys
    return given if listed else None


def run_forked(server: socket.socket, arguments: list[str]) -> None:
    """Returns only if the fork server refuses."""
    umask = os.umask(0)
    os.umask(umask)
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_inherited(number, server)]
    request = {"command": arguments, "path": sys.path, "cwd": os.getcwd(), "umask": umask, "files": files}
    request |= {"environ": dict(os.environ), "unbuffered": sys.orig_argv[1] == "-u", "at_import": AT_IMPORT.pattern}
    request["ctrl_c"] = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    content = json.dumps(request).encode()
    socket.send_fds(server, [struct.pack("q", len(content))], files)
    server.sendall(content)
    if not (answer := server.recv(8)):
        return
    (pid,) = struct.unpack("q", answer)
    group = arguments[1:2] == ["dvc"]  # tasks/system/processes.py ends its stages with it
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: pass_on(pid, number, group))
    status = server.recv(8)
    code = os.waitstatus_to_exitcode(struct.unpack("q", status)[0]) if status else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code in PASSED_ON else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def pass_on(pid: int, number: int, group: bool) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        try:
            (os.killpg if group else os.kill)(pid, number)
        except ProcessLookupError:  # it has no group yet
            os.kill(pid, number)


def _is_inherited(number: int, server: socket.socket) -> bool:
    try:
        return number != server.fileno() and (number < 3 or os.get_inheritable(number))
    except OSError:  # the one that listed the folder
        return False


if (address := os.environ.get(ADDRESS)) and (arguments := command()):
    if arguments[1:2] not in (["cli"], ["dvc"], ["uvicorn"]):
        address = os.environ.get(OF_STAGES, address)
    with socket.socket(socket.AF_UNIX) as server:
        if server.connect_ex(address) == 0:  # otherwise the tests that started it are over
            run_forked(server, arguments)
