"""Two hosts on one machine: network namespaces with an address each, joined by a cable that can be cut.

Host `b` has a disk of its own: it does not see the folder `private`. Needs root and `ip` (iproute2).
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

from tests.workspaces import PROJECT, wait_for

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
HEAD = f"{ADDRESSES['a']}:6379"
CABLE = "host0"
ONLY_B = "scorer"  # a custom Ray resource that host b alone offers
# A lost node is noticed in seconds and not in half a minute.
NOTICE = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def unable() -> str | None:
    """Why this machine cannot do it."""
    if sys.platform != "linux" or not shutil.which("ip"):
        return "network namespaces need Linux and the command `ip`"
    probe = f"dpo-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces need root: {made.stderr.strip()}"
    able = subprocess.run(["ip", "netns", "exec", probe, "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return f"a network namespace cannot be entered: {able.stderr.strip()}" if able.returncode else None


class Hosts:
    def __init__(self, private: Path, temporary: Path) -> None:
        self.private, self.temporary, self.token = private, temporary, secrets.token_hex(32)
        self.names = {host: f"dpo-{os.getpid()}-{host}" for host in ADDRESSES}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def join(self) -> None:
        """Lay the cable."""
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
        """`ray start` as the units of infra/systemd have it."""
        command = [*unit_command("head" if host == "a" else "node", ADDRESSES[host]), "--num-cpus", str(cpus)]
        if host == "a":
            command += ["--include-dashboard", "false", "--temp-dir", str(self.temporary)]
        else:
            command += ["--resources", json.dumps({ONLY_B: 1})]
            # A mount that only this process and its children see.
            command = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(self.private), *command]
        with (self.temporary.parent / f"{host}.log").open("a") as log:
            enter = ["ip", "netns", "exec", self.names[host]]
            self.nodes[host] = subprocess.Popen(
                [*enter, *command], env={**self.environment(), **NOTICE}, stdout=log, stderr=log
            )

    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "DPO_"))}
        ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "PYTHONPATH": str(PROJECT)}
        return {**clean, **ours, "OMP_NUM_THREADS": "1"}

    def open(self, command: list[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
        """A command on host a, where the driver is."""
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
        """Of everything that runs there: all of it was started by this test."""
        found = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def works(self, host: str, title: str) -> bool:
        """Whether a process with that title runs there."""
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
    """ExecStart of infra/systemd/dpo-ray-<kind>.service, with this environment and that address."""
    lines = (PROJECT / "infra" / "systemd" / f"dpo-ray-{kind}.service").read_text().splitlines()
    (started,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    words = shlex.split(started.replace("${NODE_IP}", address).replace("${HEAD}", HEAD))
    return [str(Path(sys.executable).parent / Path(words[0]).name), *words[1:]]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(private: Path) -> Iterator[Hosts]:
    folder = Path(tempfile.mkdtemp(prefix="dpo-h-"))  # short: Ray's socket names have a length limit
    hosts = Hosts(private, folder / "ray")
    try:
        hosts.join()
        hosts.start("a")
        wait_for(lambda: _listens(hosts), 60)
        hosts.start("b")
        yield hosts
    finally:
        hosts.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _listens(hosts: Hosts) -> bool:
    probe = f"import socket; socket.create_connection(('{ADDRESSES['a']}', {HEAD.partition(':')[2]}), 1)"
    return hosts.open(["-c", probe], Path("/")).wait() == 0
