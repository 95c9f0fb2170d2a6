"""An engine: vLLM's server where vLLM is installed, otherwise transformers' own, as a child on a loopback port.

The engine ends with its gateway, also after `kill -9` (tasks/system/processes.py). It needs no network, and its
environment holds none of our passwords.
"""

import json
import os
import re
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.health import rotate, wait_until_healthy
from tasks.artifacts.models import model_links
from tasks.chat import load_prompt_tokens, model_folder
from tasks.config.paths import main_checkout
from tasks.runs.named_model import RUN, named_model
from tasks.system import processes
from tasks.system.ports import free_port
from tasks.tracking.model_names import FOLDER, VERSION
from tasks.tracking.verify import require_intact

START_TIMEOUT = 900.0  # seconds: vLLM compiles, and a large model takes minutes to read
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "VLLM_NO_USAGE_STATS": "1"}
SECRET = ("DPO_", "MLFLOW_", "PREFECT_", "AWS_", "RAY_", "WANDB_", "HF_TOKEN")


@dataclass(frozen=True)
class Target:
    """What an engine serves: a registered version, or a folder (without a version)."""

    model: str
    version: str
    run: str  # that made it
    source: str  # its name for `model_folder`

    @property
    def name(self) -> str:
        return f"{self.model}/{self.version}" if self.version else self.model


def find_target(name: str) -> Target:
    """The version that a name means now: an alias may have moved since the last call."""
    found = named_model(name)
    if found.kind == VERSION:
        return Target(found.model, found.version, found.run, f"{found.model}/{found.version}")
    shown = found.folder.resolve().name if found.kind == FOLDER else name
    return Target(_plain(shown), "", found.run if found.kind == RUN else "", name)


def _plain(name: str) -> str:
    """A name that MLflow and the file system take."""
    return re.sub(r"[^\w.-]", "_", name)


def weights(target: Target, before: "Engine | None") -> Path:
    """The folder of a target, verified against its signed manifest; an engine that ended needs no registry again."""
    if before is None or before.target != target:
        return model_folder(target.source).resolve()
    if target.version:
        require_intact(before.folder)
    return before.folder


class Engine:
    """A started engine. `wait` until it is healthy before the first request."""

    def __init__(self, target: Target, folder: Path, memory_share: float) -> None:
        self.target, self.folder, self.running, self.stack = target, folder, 0, ExitStack()
        self.words = 0  # parts of answers so far: whether it gets on with any
        self.files = self.stack.enter_context(model_links(folder))  # the model alone, whatever else lies in its folder
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.log = rotate(main_checkout() / ".scratch" / "serving" / f"{_plain(target.name)}.log")
        env = {name: value for name, value in os.environ.items() if not name.startswith(SECRET)} | OFFLINE
        output = self.stack.enter_context(self.log.open("w"))
        command = engine_command(self.files, port, memory_share)
        self.process = self.stack.enter_context(processes.spawn(command, main_checkout(), env, output))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, cancelled: threading.Event) -> None:
        wait_until_healthy(
            f"{self.address}/health",
            f"The engine of {self.target.name} did not start",
            self.log,
            lambda: self.is_alive and not cancelled.is_set(),
            START_TIMEOUT,
        )
        self.prompts = load_prompt_tokens(self.folder)

    def stop(self) -> None:
        self.stack.close()

    def body(self, messages: list[dict[str, str]], parameters: dict[str, Any]) -> dict[str, Any]:
        """A request in the engine's own format, always as a stream: closing it ends the generation."""
        body: dict[str, Any] = {"model": str(self.files), "messages": messages, "stream": True}
        if uses_vllm():
            return {**body, **parameters, "stream_options": {"include_usage": True}}
        # transformers' server ignores `temperature` unless do_sample is set, and samples among 50 tokens by default.
        sampling = {"temperature": parameters["temperature"], "top_p": parameters["top_p"], "top_k": 0}
        decoding = {"do_sample": True, **sampling} if parameters["temperature"] else {"do_sample": False}
        body["generation_config"] = json.dumps({"max_new_tokens": parameters["max_tokens"], **decoding})
        return body | ({"seed": parameters["seed"]} if "seed" in parameters else {})


def uses_vllm() -> bool:
    return find_spec("vllm") is not None


def engine_command(folder: Path, port: int, memory_share: float) -> list[str]:
    options = [str(folder), "--host", "127.0.0.1", "--port", str(port)]
    if uses_vllm():
        script = str(Path(sys.executable).with_name("vllm"))
        return [script, "serve", *options, "--gpu-memory-utilization", f"{memory_share:.2f}"]
    return [sys.executable, "-m", "transformers.cli.transformers", "serve", *options, "--log-level", "error"]
