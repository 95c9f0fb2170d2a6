"""MLflow's server with logins, by MLflow's own basic authentication.

`python -m tasks.tracking.mlflow_server` takes the options of `mlflow server`. DPO_MLFLOW_USERS names the user database;
by default it is MLFLOW_BACKEND_STORE_URI, where they have tables of their own. DPO_MLFLOW_<USER>_PASSWORD holds the
password of each user:

    admin      everything, users included
    writer     everything but users: the commands of this repository
    forwarder  runs, their metrics and artifacts, no registry: tasks/tracking/uploader.py
    reader     reads, and changes nothing
"""

import os
import re
import secrets
import sys
import tempfile
from typing import Any

from tasks.system import http_limits

USERS = ("admin", "writer", "forwarder", "reader")
GRANTS = {
    "writer": {"experiment": "MANAGE", "registered_model": "MANAGE"},
    "forwarder": {"experiment": "EDIT"},
}
READS = ("GET", "HEAD", "OPTIONS")
# Paths that MLflow's pages read with POST.
SEARCHES = re.compile(r"/(search|search-[a-z-]+|batchGet\w*|batch-get|query|metrics|graphql|get-history-bulk[a-z-]*)$")
REGISTRY = re.compile(r"/mlflow/(registered-models|model-versions|model-registry)(/|$)")
ACCOUNTS = re.compile(r"/mlflow/(users|roles|webhooks)(/|$)|^/signup")


def may(user: str, method: str, path: str) -> bool:
    """Beyond MLflow's own permissions, which let every user create experiments and registered models."""
    if user == "admin" or method in READS:
        return True
    if user == "reader" or ACCOUNTS.search(path):
        return bool(SEARCHES.search(path))
    return user != "forwarder" or not REGISTRY.search(path) or bool(SEARCHES.search(path))


def authenticate() -> Any:
    """MLflow's `authorization_function`: the login of a request, or a refusal."""
    from flask import Response, request
    from mlflow.server.auth import authenticate_request_basic_auth, make_forbidden_response

    login = authenticate_request_basic_auth()
    if isinstance(login, Response) or may(str(login.username), request.method, request.path):
        return login
    return make_forbidden_response()


def configure(users: str) -> None:
    """MLflow's configuration of logins, in a file of mode 600: the database's address may hold a password."""
    handle, name = tempfile.mkstemp(prefix="mlflow-auth-", suffix=".ini")
    with os.fdopen(handle, "w") as file:
        file.write(
            f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {users.replace('%', '%%')}\nadmin_username = admin\n"
            "authorization_function = tasks.tracking.mlflow_server:authenticate\n"
            "grant_default_workspace_access = false\n"
            "auth_cache_ttl_seconds = 300\n"  # otherwise every request costs 0.4 s of password hashing
        )
    os.environ |= {"MLFLOW_AUTH_CONFIG_PATH": name, "MLFLOW_BASIC_AUTH_FAIL_CLOSED": "true"}
    os.environ.setdefault("MLFLOW_FLASK_SERVER_SECRET_KEY", secrets.token_hex(32))
    os.environ["UVICORN_HTTP"] = http_limits.NAME
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # nothing of ours runs on the server


def make_users(passwords: dict[str, str]) -> None:
    """Create the users; one that exists gets the new password."""
    from mlflow.server import auth

    os.environ["MLFLOW_AUTH_ADMIN_PASSWORD"] = passwords["admin"]
    auth.store.init_db(auth.auth_config.database_uri)
    for user, password in passwords.items():
        if not auth.store.has_user(user):
            auth.store.create_user(user, password, is_admin=user == "admin")
        elif not auth.store.authenticate_user(user, password):
            auth.store.update_user(user, password=password)
        for resource, permission in GRANTS.get(user, {}).items():
            auth.store.grant_user_permission(user, resource, "*", permission)
    del os.environ["MLFLOW_AUTH_ADMIN_PASSWORD"]


def main() -> None:
    passwords = {user: os.environ.pop(f"DPO_MLFLOW_{user.upper()}_PASSWORD", "") for user in USERS}
    if missing := [f"DPO_MLFLOW_{user.upper()}_PASSWORD" for user, password in passwords.items() if len(password) < 12]:
        sys.exit(f"error: {', '.join(missing)}: set each to a password of 12 characters or more.")
    users = os.environ.get("DPO_MLFLOW_USERS") or os.environ.get("MLFLOW_BACKEND_STORE_URI", "")
    if not users:
        sys.exit("error: MLFLOW_BACKEND_STORE_URI is not set. Set it to the address of MLflow's database.")
    configure(users)
    make_users(passwords)
    from mlflow.cli import cli

    cli(["server", "--app-name", "basic-auth", *sys.argv[1:]], prog_name="mlflow")


if __name__ == "__main__":
    main()
