"""An HTTP proxy in front of a real server that fails on demand."""

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class Proxy:
    """`mode`: good, error (500 to everything), slow (`delay` seconds each), lost (the response is dropped)."""

    def __init__(self, behind: str, port: int = 0) -> None:
        self.behind = urlparse(behind).netloc
        self.mode, self.delay, self.requests = "good", 0.0, 0
        self.dies_after: int | None = None  # requests, after which the proxy stops listening
        self.port = port
        self.server: ThreadingHTTPServer | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                proxy.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.close_connection = True
                if proxy.dies_after is not None and proxy.requests > proxy.dies_after:
                    threading.Thread(target=proxy.stop).start()
                    return
                time.sleep(proxy.delay if proxy.mode == "slow" else 0)
                if proxy.mode == "error":
                    self._respond(500, [], b"something broke")
                    return
                response, content = proxy.forward(self.command, self.path, body, dict(self.headers))
                if proxy.mode != "lost":
                    self._respond(response.status, response.getheaders(), content)

            def _respond(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self.behind, timeout=30)
        forwarded = {name: value for name, value in headers.items() if name.lower() not in {*HOP, "host"}}
        connection.request(method, path, body, forwarded)
        response = connection.getresponse()
        return response, response.read()

    def stop(self) -> None:
        server, self.server = self.server, None
        if server:
            server.shutdown()
            server.server_close()


@contextmanager
def proxied(behind: str) -> Iterator[Proxy]:
    proxy = Proxy(behind)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
