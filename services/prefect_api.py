"""Calls to Prefect's HTTP API without Prefect's own client, whose import takes seconds."""

import base64
import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from services.background import Service


def access_variables(server: Service) -> dict[str, str]:
    """Environment variables that connect a client to the server of `dpo up`, login included."""
    login = server.environment().get("PREFECT_SERVER_API_AUTH_STRING", "")
    return {"PREFECT_API_URL": f"{server.address}/api", "PREFECT_API_AUTH_STRING": login}


def basic(login: str) -> str:
    """The Authorization header of user:password."""
    return f"Basic {base64.b64encode(login.encode()).decode()}"


def post(access: Mapping[str, str], path: str, body: dict[str, Any], timeout: float = 30.0) -> Any:
    headers = {"Content-Type": "application/json"}
    if login := access.get("PREFECT_API_AUTH_STRING"):
        headers["Authorization"] = basic(login)
    request = urllib.request.Request(f"{access['PREFECT_API_URL']}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)
