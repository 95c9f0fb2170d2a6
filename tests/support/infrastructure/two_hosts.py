"""Two hosts on one machine: network namespaces with an address each, connected by a cable that tests can cut.

Host `b` has its own disk: it does not see the folder `private`. Needs root and `ip` (iproute2).
"""

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.system.environment import QUIET
from tests.support.fork_server import SITE
from tests.support.workspaces import PROJECT, wait_for

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
HEAD = f"{ADDRESSES['a']}:6379"
CABLE = "host0"
ONLY_B = "scorer"  # a custom Ray resource that host b alone offers
# Ray notices a lost node within seconds instead of half a minute.
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def skip_reason() -> str | None:
    """Why this machine cannot have network namespaces; None if it can."""
    if sys.platform != "linux" or not shutil.which("ip"):
        return "network namespaces need Linux and the command `ip`"
    probe = f"dpo-probe-{os.getpid()}"
    added = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if added.returncode:
        return f"network namespaces need root: {added.stderr.strip()}"
    entered = subprocess.run(["ip", "netns", "exec", probe, "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return f"a network namespace cannot be entered: {entered.stderr.strip()}" if entered.returncode else None


class Hosts:
    def __init__(self, private: Path, temporary: Path) -> None:
        self.private, self.temporary, self.token = private, temporary, secrets.token_hex(32)
        self.names = {host: f"dpo-{os.getpid()}-{host}" for host in ADDRESSES}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def connect(self) -> None:
        """Create both hosts and the cable between them."""
        for name in self.names.values():
            ip("netns", "add", name)
        ends = {host: f"dpo{os.getpid()}{host}" for host in ADDRESSES}
        ip("link", "add", ends["a"], "type", "veth", "peer", "name", ends["b"])
        for host, name in self.names.items():
            ip("link", "set", ends[host], "netns", name, "name", CABLE)
            ip("-n", name, "address", "add", f"{ADDRESSES[host]}/24", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def start(self, host: str, cpus: int = 1) -> None:
        """`ray start` with the command of the units in infra/systemd."""
        command = [*unit_command("head" if host == "a" else "node", ADDRESSES[host]), "--num-cpus", str(cpus)]
        if host == "a":
            command += ["--include-dashboard", "false", "--temp-dir", str(self.temporary)]
        else:
            command += ["--resources", json.dumps({ONLY_B: 1})]
            # Only this process and its children see the mount.
            command = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(self.private), *command]
        with (self.temporary.parent / f"{host}.log").open("a") as log:
            enter = ["ip", "netns", "exec", self.names[host]]
            self.nodes[host] = subprocess.Popen(
                [*enter, *command], env={**self.environment(), **HEALTH_CHECKS}, stdout=log, stderr=log
            )

    def environment(self) -> dict[str, str]:
        others = {name for name in os.environ if name.startswith(("RAY_", "DPO_"))} - QUIET.keys()
        clean = {name: value for name, value in os.environ.items() if name not in others}
        ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "PYTHONPATH": f"{PROJECT}{os.pathsep}{SITE}"}
        return {**clean, **ours, "OMP_NUM_THREADS": "1", "FORK_STAGES": "1"}

    def open(self, command: list[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
        """A command on host a, the driver's."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names["a"], sys.executable, *command],
            cwd=cwd,
            env={**self.environment(), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cable(self, state: str) -> None:
        ip("-n", self.names["b"], "link", "set", CABLE, state)

    def pids(self, host: str) -> list[int]:
        """Of all processes on the host; this test started all of them."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def is_running(self, host: str, title: str) -> bool:
        """Whether the host has a process with that title."""
        for pid in self.pids(host):
            with suppress(OSError):
                if title in Path(f"/proc/{pid}/cmdline").read_text():
                    return True
        return False

    def end(self, host: str) -> None:
        for pid in self.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if node := self.nodes.pop(host, None):
            node.wait()

    def remove(self) -> None:
        for host, name in self.names.items():
            self.end(host)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def unit_command(kind: str, address: str) -> list[str]:
    """ExecStart of infra/systemd/dpo-ray-<kind>.service for this environment and address."""
    lines = (PROJECT / "infra" / "systemd" / f"dpo-ray-{kind}.service").read_text().splitlines()
    (command,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    words = shlex.split(command.replace("${NODE_IP}", address).replace("${HEAD}", HEAD))
    return [str(Path(sys.executable).parent / Path(words[0]).name), *words[1:]]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(private: Path) -> Iterator[Hosts]:
    folder = Path(tempfile.mkdtemp(prefix="dpo-h-"))  # short: Ray's socket names have a length limit
    hosts = Hosts(private, folder / "ray")
    try:
        hosts.connect()
        hosts.start("a")
        wait_for(lambda: _head_is_up(hosts), 60)
        hosts.start("b")
        yield hosts
    finally:
        hosts.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _head_is_up(hosts: Hosts) -> bool:
    probe = f"import socket; socket.create_connection(('{ADDRESSES['a']}', {HEAD.partition(':')[2]}), 1)"
    return hosts.open(["-c", probe], Path("/")).wait() == 0
