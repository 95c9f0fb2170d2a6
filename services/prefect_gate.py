"""The gate in front of Prefect's server: under which host names it answers, and what it serves without a login.

A web page whose host name resolves to 127.0.0.1 (DNS rebinding) can reach this server through a visitor's browser,
with the page's host name in its requests. DPO_ALLOWED_HOSTS lists the accepted names, separated by commas; loopback by
default.

Prefect itself reads the login (PREFECT_SERVER_API_AUTH_STRING) below /api alone. Here everything needs it but OPEN and
the files of the pages, which ask for it in the browser. Prefect's sockets ask for it in their first message.
"""

import hmac
import os
import re
import sys
from typing import Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from prefect.settings import PREFECT_SERVER_API_AUTH_STRING
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Mount, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from services.prefect_api import basic

LOOPBACK_NAMES = "127.0.0.1,localhost,[::1]"
OPEN = {"/api/health", "/api/ready", "/ui-settings"}  # the last says that a login is needed


class Gate:
    def __init__(self, app: FastAPI, login: str) -> None:
        self.app, self.login = app, basic(login).encode()
        self.behind_login = _routes(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.is_open(scope["method"], scope["path"]) or self.has_login(scope):
            await self.app(scope, receive, send)
        else:
            await JSONResponse({"exception_message": "Unauthorized"}, 401)(scope, receive, send)

    def is_open(self, method: str, path: str) -> bool:
        if method == "OPTIONS":  # a browser asks, without a login, whether a page may send a request
            return True
        is_file = not any(pattern.match(path) for pattern in self.behind_login)
        return (method == "GET" and path in OPEN) or (method in ("GET", "HEAD") and is_file)

    def has_login(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(sent) == 1 and hmac.compare_digest(sent[0], self.login)


def _routes(app: FastAPI) -> list[re.Pattern[str]]:
    """All paths but those of the pages' files: the API, and what FastAPI or a new version of Prefect adds beside it."""
    pages: Any = next(mount.app for mount in app.routes if isinstance(mount, Mount) and not mount.path)
    contexts = [*iter_route_contexts(app.routes), *iter_route_contexts(pages.routes)]
    paths = [(context.path, context.methods) for context in contexts]
    return [compile_path(path if methods else f"{path}/{{below:path}}")[0] for path, methods in paths if path]


def guarded(app: FastAPI) -> ASGIApp:
    if not (login := PREFECT_SERVER_API_AUTH_STRING.value()):
        name = PREFECT_SERVER_API_AUTH_STRING.name
        sys.exit(f"error: {name} is not set: anybody who reaches the server could run code. Set it to user:password.")
    hosts = [name.strip() for name in (os.environ.get("DPO_ALLOWED_HOSTS") or LOOPBACK_NAMES).split(",")]
    return TrustedHostMiddleware(Gate(app, login), allowed_hosts=hosts, www_redirect=False)
