"""Stages in processes forked from one that has imported our libraries: each import takes eight seconds of a core."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

LIBRARIES = ["datasets", "mlflow", "pandas", "peft", "safetensors.torch", "tensorboardX", "transformers"]
TIMEOUT = 900


def forked_stage(workspace: Path, stage: str, env: dict[str, str]) -> tuple[int | None, str]:
    """The exit code and the output of `python -m tasks.STAGE` in a workspace."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    with tempfile.NamedTemporaryFile("r") as log:
        process = context.Process(target=_run, args=(str(workspace), stage, env, log.name))
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode, log.read()


def _run(workspace: str, stage: str, env: dict[str, str], log: str) -> None:
    os.setsid()
    os.chdir(workspace)
    os.environ.clear()
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [f"tasks.{stage}"]
    runpy.run_module(f"tasks.{stage}", run_name="__main__", alter_sys=True)
