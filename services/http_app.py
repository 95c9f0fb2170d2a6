"""What our own HTTP servers share: gateway, arena and metrics endpoint."""

from typing import Any

import uvicorn
from fastapi import FastAPI

from tasks.system.http_limits import LimitedProtocol


def plain_app(**options: Any) -> FastAPI:
    """Without FastAPI's own pages, which need no login and load scripts from other hosts."""
    return FastAPI(docs_url=None, redoc_url=None, openapi_url=None, **options)


def run(app: FastAPI, host: str, port: int, **options: Any) -> None:
    """Until SIGTERM or Ctrl-C."""
    uvicorn.run(app, host=host, port=port, log_level="warning", http=LimitedProtocol, **options)
