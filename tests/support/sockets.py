"""The ports on which a process and its descendants listen, as the kernel lists them (Linux)."""

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.fork_server import family

LISTENING = "0A"


def listeners(pid: int) -> dict[tuple[str, int], str]:
    """Command line of the listening process, by (address, port)."""
    owners = _sockets(pid)
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and inode in owners:
                host, port = local.split(":")
                ports[str(_address(host)), int(port, 16)] = owners[inode]
    return ports


def outside_loopback(pid: int) -> dict[tuple[str, int], str]:
    return {key: title for key, title in listeners(pid).items() if not ipaddress.ip_address(key[0]).is_loopback}


def _sockets(pid: int) -> dict[str, str]:
    """Command line of a process that has the socket open, by the socket's inode."""
    owners = {}
    for process in family(pid):
        with suppress(OSError, psutil.Error):  # it ended meanwhile
            title = " ".join(process.cmdline())
            for descriptor in os.scandir(f"/proc/{process.pid}/fd"):
                with suppress(OSError):
                    target = os.readlink(descriptor.path)
                    if target.startswith("socket:["):
                        owners[target[len("socket:[") : -1]] = title
    return owners


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel writes addresses as 32-bit words in native byte order."""
    words = [text[start : start + 8] for start in range(0, len(text), 8)]
    packed = b"".join(struct.pack("=I", int(word, 16)) for word in words)
    if len(packed) == 4:
        return ipaddress.IPv4Address(socket.inet_ntop(socket.AF_INET, packed))
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address
