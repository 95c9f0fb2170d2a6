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

import yaml

from flows.services import free_port
from tests.workspaces import PROJECT

INFRA = PROJECT / "infra"
IMAGE = "dpo-pipeline:test-stack"
BEGAN = time.monotonic()


def say(what: str) -> None:
    print(f"[{time.monotonic() - BEGAN:7.1f} s] {what}", flush=True)


def compose_command() -> list[str] | None:
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]) and not subprocess.run([*words, "version"], capture_output=True).returncode:
            return words
    return None


def unable() -> str | None:
    """Why this machine cannot start the stack."""
    if not shutil.which("docker"):
        return "the command `docker` is not installed"
    asked = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True)
    if asked.returncode:
        return f"no container engine answers: {asked.stderr.strip().splitlines()[-1]}"
    return None if compose_command() else "neither `docker compose` nor `docker-compose` is installed"


def lay_over(below: Any, above: Any) -> Any:
    """`above` on `below`; null removes a key."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    merged = {**below, **{name: lay_over(below.get(name), value) for name, value in above.items()}}
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
            content = lay_over(content, yaml.safe_load((PROJECT / stand_ins).read_text()))
        for name, service in content["services"].items():
            if service["image"].startswith("dpo-pipeline:"):
                service["image"] = IMAGE
            if ports := service.get("ports"):
                self.ports[name] = free_port()
                service["ports"] = [f"127.0.0.1:{self.ports[name]}:{ports[0].rpartition(':')[2]}"]
        self.file.write_text(yaml.safe_dump({"version": "3.9", **content}, sort_keys=False))
        names = re.findall(r"^(\w+)=$", (INFRA / "env.example").read_text(), re.M)
        self.secrets = {name: secrets.token_hex(32) for name in names}
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
        """What the engine knows of our containers, by name."""
        label = f"label=com.docker.compose.project={self.project}"
        more = ["--filter", f"label=com.docker.compose.service={service}"] if service else []
        ids = docker("ps", "--all", "--quiet", "--filter", label, *more).split()
        found = json.loads(docker("inspect", *ids)) if ids else []
        return {one["Name"].lstrip("/"): one for one in found}

    def unhealthy(self) -> list[str]:
        return [
            name
            for name, one in self.containers().items()
            if one["State"].get("Health", {}).get("Status", "healthy") != "healthy"
            or (one["State"]["Status"], one["State"]["ExitCode"]) not in (("running", 0), ("exited", 0))
        ]

    def up(self) -> None:
        """Until every container is healthy. Compose gives up on a container that Docker restarts meanwhile."""

        def started() -> bool:
            words = [*self.command, "up", "--detach", "--no-build"]
            return not subprocess.run(words, capture_output=True).returncode

        def why() -> str:
            return f"not healthy: {self.unhealthy()}\n{self.logs()}"

        wait(started, 900, why)
        wait(lambda: not self.unhealthy(), 600, why)

    def restart(self, service: str) -> float:
        """Kill one container of a service and start it again; seconds until it is healthy."""
        name = sorted(self.containers(service))[0]
        began = time.monotonic()
        docker("kill", name)
        docker("start", name)
        wait(lambda: not self.unhealthy(), 300, lambda: f"not healthy: {self.unhealthy()}\n{self.logs(service)}")
        return time.monotonic() - began

    def logs(self, service: str = "", lines: int = 60) -> str:
        return self.compose("logs", "--no-color", f"--tail={lines}", *([service] if service else []), check=False)

    def prefect(self, path: str, content: Any = None) -> Any:
        return self._ask("prefect", f"/api{path}", f"dpo:{self.secrets['PREFECT_PASSWORD']}", content, "127.0.0.1:4200")

    def mlflow(self, path: str, content: Any = None) -> Any:
        login = f"reader:{self.secrets['MLFLOW_READER_PASSWORD']}"
        return self._ask("mlflow", f"/api/2.0/mlflow{path}", login, content, "127.0.0.1:5000")

    def _ask(self, service: str, path: str, login: str, content: Any, host: str) -> Any:
        """A server answers to its own host name and port; ours is another on this machine."""
        head = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}", "Host": host}
        data = None if content is None else json.dumps(content).encode()
        address = f"http://127.0.0.1:{self.ports[service]}{path}"
        request = urllib.request.Request(address, data, {**head, "Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
    return done.stdout


def wait(condition: Callable[[], Any], seconds: float, why: Callable[[], str] = lambda: "waited in vain") -> Any:
    """Until the condition holds; a server that is down meanwhile is no answer."""
    until = time.monotonic() + seconds
    while True:
        try:
            if found := condition():
                return found
        except (OSError, urllib.error.URLError):
            pass
        assert time.monotonic() < until, why()
        time.sleep(1)
