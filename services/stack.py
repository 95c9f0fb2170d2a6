"""The services of `dpo up` and their settings: Prefect server, MLflow server, worker and metrics endpoint.

All services bind to loopback and require a login (services/passwords.py). Environment variables:

    BIND                                   another address to listen on, to open the pages to other machines
    DPO_ALLOWED_HOSTS                      additional host names under which browsers reach the pages
    PREFECT_SERVER_API_AUTH_STRING         user:password, replaces Prefect's generated login
    PREFECT_PORT, PORT, METRICS_PORT       ports of Prefect, MLflow and the metrics endpoint
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import psutil

from services import background, passwords
from services.background import Service
from tasks.checkout import HOME
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.runs import dvc
from tasks.system.ports import free_port, is_free, port_holder

LOOPBACK = "127.0.0.1"
BIND, LOGIN, HOSTS = "BIND", "PREFECT_SERVER_API_AUTH_STRING", "DPO_ALLOWED_HOSTS"
TIMEZONE = "DPO_TIMEZONE"
POOL = "dpo"
TITLES = {
    "prefect": "Prefect server",
    "mlflow": "MLflow server",
    "worker": "worker",
    "metrics": "metrics endpoint",
}
PORTS = {"prefect": ("PREFECT_PORT", 4200), "mlflow": ("PORT", 5000), "metrics": ("METRICS_PORT", 9464)}
HEARTBEAT_TIMEOUT = 120  # seconds: a run that misses four heartbeats counts as crashed
LEASES = "prefect.server.concurrency.lease_storage.filesystem"


@dataclass(frozen=True)
class Settings:
    """The settings from the environment, validated."""

    bind: str
    login: str | None  # user:password
    ports: Mapping[str, int]  # only those that the environment sets
    webhook: str | None  # None: leave notifications as they are; "": remove them
    heartbeat_timeout: int  # seconds
    timezone: str  # of the schedules, an IANA name

    @property
    def is_public(self) -> bool:
        try:
            return not ipaddress.ip_address(self.bind).is_loopback
        except ValueError:
            return self.bind != "localhost"

    @property
    def host(self) -> str:
        """The host part of URLs that reach the services from this machine."""
        host = {"0.0.0.0": LOOPBACK, "localhost": LOOPBACK, "::": "::1"}.get(self.bind, self.bind)
        return _bracketed(host)


def read_settings(env: Mapping[str, str]) -> Settings:
    login, webhook = env.get(LOGIN) or None, env.get("DPO_WEBHOOK_URL")
    if login is not None and not all(login.partition(":")):
        raise UserError(f"{LOGIN} must have the form user:password. Correct it or unset it.")
    if webhook and not webhook.startswith(("http://", "https://")):
        raise UserError(
            "DPO_WEBHOOK_URL must start with http:// or https://. Correct it, or set it to nothing to turn "
            "notifications off."
        )
    ports = {name: _port(variable, env[variable]) for name, (variable, _) in PORTS.items() if env.get(variable)}
    timeout = env.get("DPO_SILENCE_SECONDS") or str(HEARTBEAT_TIMEOUT)
    if not timeout.isdigit() or int(timeout) <= 30:
        raise UserError(
            f"DPO_SILENCE_SECONDS is '{timeout}'; it must be a number above 30, the seconds between two heartbeats."
        )
    return Settings(env.get(BIND) or LOOPBACK, login, ports, webhook, int(timeout), timezone(env))


def timezone(env: Mapping[str, str]) -> str:
    """The time zone of the schedules: DPO_TIMEZONE, else TZ, else UTC."""
    variable = next((name for name in (TIMEZONE, "TZ") if env.get(name)), None)
    if variable is None:
        return "UTC"
    name = env[variable].removeprefix(":")  # POSIX allows TZ=:Europe/Berlin
    try:
        return ZoneInfo(name).key
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise UserError(
            f"{variable} is '{name}', which is not a time zone. Set {TIMEZONE} to an IANA name such as Europe/Berlin "
            "or UTC; it applies to the schedules."
        ) from None


def _port(variable: str, text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise UserError(f"{variable} is '{text}'; a port is a number from 1 to 65535.")
    return int(text)


def choose_port(name: str, settings: Settings) -> int:
    """The configured port, else the last one, else the default, else any free port (with a message)."""
    variable, default = PORTS[name]
    if configured := settings.ports.get(name):
        if not is_free(settings.bind, configured):
            raise UserError(
                f"Port {configured} is in use by {port_holder(configured)}. Set {variable} to another "
                "port, or unset it to let `dpo up` choose a free one."
            )
        return configured
    before = background.last_started(name)
    preferred = [before.port, default] if before else [default]
    for port in preferred:
        if is_free(settings.bind, port):
            return port
    port = free_port()
    print(
        f"Port {preferred[0]} is in use by {port_holder(preferred[0])}: the {TITLES[name]} listens on "
        f"{port} instead. Set {variable} to choose another port.",
        flush=True,
    )
    return port


def start_prefect(settings: Settings) -> Service:
    port, page = _prepare_address("prefect", settings)
    env = {
        "PREFECT_API_URL": f"{page}/api",
        "PREFECT_UI_URL": page,  # links in notifications
        "PREFECT_SERVER_UI_API_URL": "/api",  # relative: works under every host name
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_METRICS_ENABLED": "true",  # /api/metrics, behind the login
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,  # in memory, a restart would crash the runs that hold one
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}:{port}" for host in allowed_hosts(settings)),
        HOSTS: ",".join(allowed_hosts(settings)),
    }
    home = Path(os.environ.get("PREFECT_HOME") or ROOT / ".prefect")
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)  # the database holds the key with which Prefect encrypts secrets
    command = _command("services.prefect_sqlite", "server", "start", "--host", settings.bind, "--port", str(port))
    return background.start("prefect", command, common_env(settings) | env, port, page, f"{page}/api/health")


def start_mlflow(settings: Settings, store: str) -> Service:
    """Serve the store that runs write to directly; no run needs this server.

    The store's address may contain a password, so it goes into the environment: all users can see arguments.
    """
    port, page = _prepare_address("mlflow", settings)
    command = _command("tasks.tracking.mlflow_server", "--host", settings.bind, "--port", str(port))
    command += ["--workers", "1", "--artifacts-destination", str(ROOT / ".mlflow" / "artifacts")]
    users = passwords.mlflow_passwords().items()
    env = {
        **{f"DPO_MLFLOW_{user.upper()}_PASSWORD": password for user, password in users},
        "DPO_MLFLOW_USERS": f"sqlite:///{background.FOLDER / 'mlflow-users.db'}",
        "MLFLOW_BACKEND_STORE_URI": store,
        **mlflow_host_checks(settings, port),
    }
    return background.start("mlflow", command, common_env(settings) | env, port, page, f"{page}/health")


def start_worker(settings: Settings, api: str) -> Service:
    port = free_port()
    page = f"http://{LOOPBACK}:{port}"
    env = {
        "PREFECT_API_URL": api,
        "PREFECT_WORKER_WEBSERVER_HOST": LOOPBACK,  # Prefect's default is every interface
        "PREFECT_WORKER_WEBSERVER_PORT": str(port),
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # the longest delay before a run starts
    }
    command = _command("prefect", "worker", "start", "--pool", POOL, "--type", "process", "--with-healthcheck")
    return background.start("worker", command, common_env(settings) | env, port, page, f"{page}/health")


def start_metrics(settings: Settings) -> Service:
    """The endpoint for Prometheus, which logs in with the password of MLflow's reader."""
    port, page = _prepare_address("metrics", settings)
    command = _command("services.metrics_endpoint", "--host", settings.bind, "--port", str(port))
    env = common_env(settings) | {"DPO_METRICS_PASSWORD": passwords.mlflow_passwords()["reader"]}
    env.pop("PREFECT_API_URL", None)  # the endpoint finds the server of `dpo up`, also after it moved to another port
    return background.start("metrics", command, env, port, f"{page}/metrics", f"{page}/health")


def _prepare_address(name: str, settings: Settings) -> tuple[int, str]:
    """The port of a server and the URL of its pages. A killed server's children still hold its port: they end first."""
    background.end_leftovers(name)
    port = choose_port(name, settings)
    return port, f"http://{settings.host}:{port}"


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def common_env(settings: Settings) -> dict[str, str]:
    logins = (LOGIN, "PREFECT_API_AUTH_STRING")
    env = dvc.environment(**{HOME: str(ROOT)}, PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="INFO", BIND=settings.bind)
    for name in ("DPO_WEBHOOK_URL", *logins):
        env.pop(name, None)
    return env | dict.fromkeys(logins, settings.login) if settings.login else env


def mlflow_host_checks(settings: Settings, port: int) -> dict[str, str]:
    """MLflow checks the host of every request and the origin of every request that changes something."""
    names = [f"{host}:{port}" for host in allowed_hosts(settings)]
    origins = ",".join(f"http://{name}" for name in names)
    return {"MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(names), "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": origins}


def allowed_hosts(settings: Settings) -> list[str]:
    """The host names under which browsers may open the pages: loopback, and this machine's if the pages are public."""
    names = [LOOPBACK, "localhost", "[::1]"]
    if settings.is_public:
        interfaces = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
        internet = [entry.address for entry in interfaces if entry.family in (socket.AF_INET, socket.AF_INET6)]
        names += [_bracketed(address.partition("%")[0]) for address in internet]
        own = [socket.gethostname(), socket.getfqdn()]
        names += [*own, *map(str.lower, own), settings.host]  # browsers write host names in lower case
    names += [name.strip() for name in os.environ.get(HOSTS, "").split(",") if name.strip()]
    return list(dict.fromkeys(names))


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
