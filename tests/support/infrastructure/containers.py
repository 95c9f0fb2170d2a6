"""infra/compose.yaml on a real container engine, as a project with its own ports, volumes and secrets."""

import base64
import json
import os
import re
import secrets
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tasks.system.ports import free_port
from tests.support.workspaces import PROJECT

INFRA = PROJECT / "infra"
IMAGE = "dpo-pipeline:test-stack"
BEGAN = time.monotonic()


def log(message: str) -> None:
    print(f"[{time.monotonic() - BEGAN:7.1f} s] {message}", flush=True)


def compose_command() -> list[str] | None:
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]) and not subprocess.run([*words, "version"], capture_output=True).returncode:
            return words
    return None


def missing_requirement() -> str | None:
    """Why this machine cannot start the stack; None if it can."""
    if not shutil.which("docker"):
        return "the command `docker` is not installed"
    version = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True)
    if version.returncode:
        return f"no container engine responds: {version.stderr.strip().splitlines()[-1]}"
    return None if compose_command() else "neither `docker compose` nor `docker-compose` is installed"


def merge(base: Any, overlay: Any) -> Any:
    """Merge nested dictionaries; null in the overlay removes a key."""
    if not isinstance(base, dict) or not isinstance(overlay, dict):
        return overlay
    merged = {**base, **{name: merge(base.get(name), value) for name, value in overlay.items()}}
    return {name: value for name, value in merged.items() if value is not None}


@dataclass
class Stack:
    folder: Path
    project: str = field(default_factory=lambda: f"dpo-test-{os.getpid()}")
    ports: dict[str, int] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)

    def prepare(self, stand_ins: str | None) -> None:
        """Write the compose file and its secrets."""
        content = yaml.safe_load((INFRA / "compose.yaml").read_text())
        content = {key: value for key, value in content.items() if key != "name" and not key.startswith("x-")}
        if stand_ins:
            content = merge(content, yaml.safe_load((PROJECT / stand_ins).read_text()))
        for name, service in content["services"].items():
            if service["image"].startswith("dpo-pipeline:"):
                service["image"] = IMAGE
            if ports := service.get("ports"):
                self.ports[name] = free_port()
                service["ports"] = [f"127.0.0.1:{self.ports[name]}:{ports[0].rpartition(':')[2]}"]
        self.file.write_text(yaml.safe_dump({"version": "3.9", **content}, sort_keys=False))
        names = re.findall(r"^(\w+)=$", (INFRA / "env.example").read_text(), re.M)
        self.secrets = {name: secrets.token_hex(32) for name in [*names, "SERVE_TOKEN"]}
        self.env_file.write_text("".join(f"{name}={value}\n" for name, value in self.secrets.items()))
        self.env_file.chmod(0o600)

    def image(self) -> str:
        return IMAGE

    @property
    def file(self) -> Path:
        return self.folder / "compose.yaml"

    @property
    def env_file(self) -> Path:
        return self.folder / "env"

    @property
    def command(self) -> list[str]:
        words = [*(compose_command() or []), "-f", str(self.file), "--env-file", str(self.env_file)]
        return [*words, "--project-directory", str(INFRA), "-p", self.project]

    def compose(self, *words: str, check: bool = True) -> str:
        done = subprocess.run([*self.command, *words], capture_output=True, text=True)
        assert done.returncode == 0 or not check, (
            f"compose {' '.join(words)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
        return done.stdout

    def inside(self, service: str, script: str, check: bool = True) -> str:
        """The output of a shell script in a service's container."""
        return self.compose("exec", "-T", service, "bash", "-euc", script, check=check)

    def containers(self, service: str = "") -> dict[str, dict[str, Any]]:
        """The engine's description of our containers, by name."""
        label = f"label=com.docker.compose.project={self.project}"
        more = ["--filter", f"label=com.docker.compose.service={service}"] if service else []
        ids = docker("ps", "--all", "--quiet", "--filter", label, *more).split()
        descriptions = json.loads(docker("inspect", *ids)) if ids else []
        return {container["Name"].lstrip("/"): container for container in descriptions}

    def unhealthy(self) -> list[str]:
        return [
            name
            for name, state in ((name, container["State"]) for name, container in self.containers().items())
            if state.get("Health", {}).get("Status", "healthy") != "healthy"
            or (state["Status"], state["ExitCode"]) not in (("running", 0), ("exited", 0))
        ]

    def up(self) -> None:
        """Start the stack and wait until every container is healthy. Compose gives up on restarted ones: retry."""

        def started() -> bool:
            words = [*self.command, "up", "--detach", "--no-build"]
            return not subprocess.run(words, capture_output=True).returncode

        def problem() -> str:
            return f"not healthy: {self.unhealthy()}\n{self.logs()}"

        wait(started, 900, problem)
        wait(lambda: not self.unhealthy(), 600, problem)

    def restart(self, service: str) -> float:
        """Kill one container of a service and start it again. Returns the seconds until it is healthy."""
        name = sorted(self.containers(service))[0]
        began = time.monotonic()
        docker("kill", name)
        docker("start", name)
        wait(lambda: not self.unhealthy(), 300, lambda: f"not healthy: {self.unhealthy()}\n{self.logs(service)}")
        return time.monotonic() - began

    def logs(self, service: str = "", lines: int = 60) -> str:
        return self.compose("logs", "--no-color", f"--tail={lines}", *([service] if service else []), check=False)

    def prefect(self, path: str, content: Any = None) -> Any:
        return self._request(
            "prefect", f"/api{path}", f"dpo:{self.secrets['PREFECT_PASSWORD']}", content, "127.0.0.1:4200"
        )

    def mlflow(self, path: str, content: Any = None) -> Any:
        login = f"reader:{self.secrets['MLFLOW_READER_PASSWORD']}"
        return self._request("mlflow", f"/api/2.0/mlflow{path}", login, content, "127.0.0.1:5000")

    def serve(self, path: str, content: Any, token: str | None = None) -> tuple[int, Any]:
        """The status and content of a response of the gateway."""
        head = {"Authorization": f"Bearer {token or self.secrets['SERVE_TOKEN']}"}
        address = f"http://127.0.0.1:{self.ports['serve']}{path}"
        response = httpx.post(address, json=content, headers=head, timeout=60, trust_env=False)
        return response.status_code, response.json()

    def _request(self, service: str, path: str, login: str, content: Any, host: str) -> Any:
        """The servers accept only their own host and port, which differ from those published on this machine."""
        head = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}", "Host": host}
        data = None if content is None else json.dumps(content).encode()
        address = f"http://127.0.0.1:{self.ports[service]}{path}"
        request = urllib.request.Request(address, data, {**head, "Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
    return done.stdout


def wait(condition: Callable[[], Any], seconds: float, problem: Callable[[], str] = lambda: "timed out") -> Any:
    """Wait until the condition holds; connection errors count as not yet."""
    until = time.monotonic() + seconds
    while True:
        try:
            if result := condition():
                return result
        except (OSError, urllib.error.URLError):
            pass
        assert time.monotonic() < until, problem()
        time.sleep(1)
