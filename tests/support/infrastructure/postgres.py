"""A temporary Postgres server on a free loopback port, run as an unprivileged user."""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.system import processes
from tasks.system.ports import free_port
from tests.support.workspaces import wait_for

NOBODY = 65534  # Postgres refuses to run as root


@dataclass(frozen=True)
class Postgres:
    port: int
    password: str

    def connect(self, database: str) -> Any:
        import psycopg2

        connection = psycopg2.connect(
            host="127.0.0.1", port=self.port, user="dpo", password=self.password, dbname=database, connect_timeout=5
        )
        connection.autocommit = True
        return connection

    def query_value(self, database: str, query: str) -> Any:
        """The single value that a query returns."""
        connection = self.connect(database)
        with connection, connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchone()[0]


def user() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}


def binaries() -> Path | None:
    """The newest installed version. Wheels on PyPI lack the extension pg_trgm, which Prefect requires."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("postgres")
    return next(iter([*folders, *([Path(on_path).parent] if on_path else [])]), None)


@contextmanager
def running(database: str, script: Path) -> Iterator[Postgres]:
    """A server with this database, after running the script."""
    programs = binaries()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="dpo-pg-"))  # unlike pytest's folders, accessible to another user
    server = Postgres(free_port(), secrets.token_hex(16))
    try:
        (folder / "password").write_text(server.password)
        if user():
            os.chown(folder, NOBODY, NOBODY)
            os.chown(folder / "password", NOBODY, NOBODY)
        _initialise(programs, folder)
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": folder, "fsync": "off"}
        flags = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        command = [str(programs / "postgres"), "-D", str(folder / "data"), "-p", str(server.port), *map(str, flags)]
        drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if user() else []
        with (
            (folder / "log").open("w") as log,
            processes.spawn([*drop, *command], Path("/"), {"PATH": os.environ["PATH"], "LC_ALL": "C"}, log),
        ):
            wait_for(lambda: _accepts_connections(server), 30)
            # Postgres ends after its last connection.
            with closing(server.connect("postgres")) as connection, connection.cursor() as cursor:
                cursor.execute(f"CREATE DATABASE {database}")
                cursor.execute(script.read_text())
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _initialise(programs: Path, folder: Path) -> None:
    options = ["--username=dpo", f"--pwfile={folder / 'password'}", "--auth=scram-sha-256", "--no-locale"]
    subprocess.run(
        [programs / "initdb", "-D", folder / "data", "--encoding=UTF8", "--no-sync", *options],
        **user(),
        cwd="/",
        capture_output=True,
        check=True,
    )


def _accepts_connections(server: Postgres) -> bool:
    import psycopg2

    try:
        server.connect("postgres").close()
    except psycopg2.OperationalError:
        return False
    return True
