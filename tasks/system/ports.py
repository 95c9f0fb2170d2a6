"""TCP ports of this machine: a free one, and who holds one that is in use."""

import socket
from contextlib import suppress

import psutil

from tasks.errors import UserError


def require_free(host: str, port: int) -> None:
    if not is_free(host, port):
        raise UserError(f"Port {port} of {host} is in use by {port_holder(port)}. Choose another one with --port.")


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        probe.bind((host, port))
        return True
    return False


def port_holder(port: int) -> str:
    """The process that listens on a port, for messages; processes of other users are not visible."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            listening = connection.status == psutil.CONN_LISTEN and tuple(connection.laddr)[1:] == (port,)
            if listening and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid} (`{command[:80]}`)"
    return "another program"


def http_address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
