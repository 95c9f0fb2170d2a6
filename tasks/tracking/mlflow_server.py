"""MLflow's server with logins, by MLflow's own basic authentication and our gate in front of it (mlflow_gate.py).

`python -m tasks.tracking.mlflow_server` takes the options of `mlflow server`. DPO_MLFLOW_USERS names the user database;
by default it is MLFLOW_BACKEND_STORE_URI, where they have tables of their own. DPO_MLFLOW_<USER>_PASSWORD holds the
password of each user; mlflow_routes.py lists what each may do:

    admin      everything that is served, users included
    writer     everything but users: the commands of this repository
    forwarder  runs, their metrics and artifacts, traces, no registry: tasks/tracking/uploader.py
    reader     reads, and changes nothing

Nobody reaches what runs code or holds keys on the server: assistant, gateway, secrets, jobs, scorers.
"""

import os
import secrets
import sys
import tempfile
from pathlib import Path

from tasks.system import http_limits

USERS = ("admin", "writer", "forwarder", "reader")
APP = "dpo = tasks.tracking.mlflow_gate:create_app"
GRANTS = {
    "writer": {"experiment": "MANAGE", "registered_model": "MANAGE"},
    "forwarder": {"experiment": "EDIT"},
}


def configure(users: str) -> None:
    """MLflow's configuration of logins, in a private folder: the database's address may hold a password.

    The folder also tells `mlflow server` of the app `dpo`, as an installed package would; images do not install ours.
    """
    folder = Path(tempfile.mkdtemp(prefix="mlflow-auth-"))
    (folder / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {users.replace('%', '%%')}\nadmin_username = admin\n"
        "grant_default_workspace_access = false\n"
        "auth_cache_ttl_seconds = 300\n"  # otherwise every request costs 0.4 s of password hashing
    )
    (folder / "dpo_mlflow-0.dist-info").mkdir()
    (folder / "dpo_mlflow-0.dist-info" / "entry_points.txt").write_text(f"[mlflow.app]\n{APP}\n")
    sys.path.append(str(folder))
    os.environ |= {"MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"), "MLFLOW_BASIC_AUTH_FAIL_CLOSED": "true"}
    os.environ.setdefault("MLFLOW_FLASK_SERVER_SECRET_KEY", secrets.token_hex(32))
    os.environ["UVICORN_HTTP"] = http_limits.NAME
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # nothing runs on the server


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

    cli(["server", "--app-name", "dpo", *sys.argv[1:]], prog_name="mlflow")


if __name__ == "__main__":
    main()
