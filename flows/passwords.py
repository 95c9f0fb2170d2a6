"""The logins of the servers that `make up` starts: generated at its first start, readable by their owner alone.

.services/passwords.json holds them. prefect.toml in the repository root, which the `prefect` command reads by itself,
holds the address and the login of the running server; `make down` removes it.
"""

import json
import os
import secrets
import tempfile
import tomllib
from pathlib import Path

from flows import ROOT, services

FILE = services.FOLDER / "passwords.json"
CLIENT = ROOT / "prefect.toml"
OURS = "# Written by `make up`, removed by `make down`: how the `prefect` command reaches the server.\n"
PREFECT_USER = "admin"
MLFLOW_USERS = ("admin", "writer", "forwarder", "reader")  # tasks/tracking/users.py says what each may do


def load() -> dict[str, str]:
    """Passwords by `server/user`; generated where there are none yet."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    names = [f"prefect/{PREFECT_USER}", *(f"mlflow/{user}" for user in MLFLOW_USERS)]
    if missing := [name for name in names if name not in known]:
        known |= {name: secrets.token_urlsafe(24) for name in missing}
        services.make_folder()
        write_private(FILE, json.dumps(known, indent=2) + "\n")
    return {str(name): str(value) for name, value in known.items()}


def prefect_login() -> str:
    """As Prefect takes it: user:password."""
    return f"{PREFECT_USER}:{load()[f'prefect/{PREFECT_USER}']}"


def mlflow_passwords() -> dict[str, str]:
    return {user: load()[f"mlflow/{user}"] for user in MLFLOW_USERS}


def write_client(api: str, login: str) -> bool:
    """prefect.toml for the `prefect` command; False where a file of the user's own is in the way."""
    if CLIENT.exists() and not _is_ours():
        return False
    quoted = json.dumps(login, ensure_ascii=False)  # a JSON string is a TOML string
    write_private(CLIENT, f'{OURS}[api]\nurl = "{api}"\nauth_string = {quoted}\n')
    return True


def client_api() -> str | None:
    """The address in our prefect.toml, which may be that of a server that was killed."""
    return str(tomllib.loads(CLIENT.read_text())["api"]["url"]) if _is_ours() else None


def remove_client() -> None:
    if _is_ours():
        CLIENT.unlink()


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, and at no moment readable by anybody else: mkstemp makes files of mode 600."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, path)


def _is_ours() -> bool:
    return CLIENT.exists() and CLIENT.read_text().startswith(OURS)
