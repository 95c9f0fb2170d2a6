"""The store where the ranks of a process group find each other. Imports little: Ray Train's controller loads it."""

import socket
import uuid
from pathlib import Path


def store_address(session: Path | str | None) -> str:
    """A file in an embedded cluster's session folder, or a free port of this process's node."""
    if session:
        return f"file://{session}/ranks-{uuid.uuid4().hex}"
    import ray

    host = ray.util.get_node_ip_address()
    with socket.create_server(("", 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
