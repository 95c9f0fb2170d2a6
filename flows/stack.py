"""What `make up` starts: Prefect's and MLflow's server, a worker and the metrics endpoint, and with which settings.

Everything binds to loopback and asks for a login (flows/passwords.py). BIND=address opens the pages to others,
DPO_ALLOWED_HOSTS adds host names by which they come, PREFECT_SERVER_API_AUTH_STRING=user:password replaces Prefect's
login. PREFECT_PORT, PORT and METRICS_PORT choose the ports of Prefect, MLflow and the metrics endpoint.
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

from flows import ROOT, passwords, services
from flows.services import Service, free_port
from tasks.errors import UserError
from tasks.stage import QUIET

LOOPBACK = "127.0.0.1"
BIND, SECRET, HOSTS = "BIND", "PREFECT_SERVER_API_AUTH_STRING", "DPO_ALLOWED_HOSTS"
TIMEZONE = "DPO_TIMEZONE"
POOL = "dpo"
TITLES = {
    "prefect": "Prefect's server",
    "mlflow": "MLflow's server",
    "worker": "the worker",
    "metrics": "the metrics endpoint",
}
PORTS = {"prefect": ("PREFECT_PORT", 4200), "mlflow": ("PORT", 5000), "metrics": ("METRICS_PORT", 9464)}
SILENCE = 120  # seconds after which a run without a heartbeat is taken for dead: four of them
LEASES = "prefect.server.concurrency.lease_storage.filesystem"


@dataclass(frozen=True)
class Settings:
    """What the environment asks for, checked."""

    bind: str
    secret: str | None  # user:password
    ports: Mapping[str, int]  # those that were asked for by name
    webhook: str | None  # None: leave notifications as they are; "": no more of them
    silence: int  # seconds
    timezone: str  # of the schedules, an IANA name

    @property
    def open(self) -> bool:
        return not _is_loopback(self.bind)


def settings(env: Mapping[str, str]) -> Settings:
    bind, secret = env.get(BIND) or LOOPBACK, env.get(SECRET) or None
    if secret is not None and not all(secret.partition(":")):
        raise UserError("PREFECT_SERVER_API_AUTH_STRING must be user:password. Set it so, or unset it.")
    webhook = env.get("DPO_WEBHOOK_URL")
    if webhook and not webhook.startswith(("http://", "https://")):
        raise UserError("DPO_WEBHOOK_URL must begin with http:// or https://. Mend it; empty, it ends notifications.")
    ports = {name: _port(variable, env[variable]) for name, (variable, _) in PORTS.items() if env.get(variable)}
    silence = env.get("DPO_SILENCE_SECONDS") or str(SILENCE)
    if not silence.isdigit() or int(silence) <= 30:
        raise UserError(f"DPO_SILENCE_SECONDS must be more than a heartbeat's 30 seconds, and it is '{silence}'.")
    return Settings(bind, secret, ports, webhook, int(silence), timezone(env))


def timezone(env: Mapping[str, str]) -> str:
    """Of the schedules: DPO_TIMEZONE, or else TZ, or else UTC."""
    variable = next((name for name in (TIMEZONE, "TZ") if env.get(name)), None)
    if variable is None:
        return "UTC"
    name = env[variable].removeprefix(":")  # POSIX allows TZ=:Europe/Berlin
    try:
        return ZoneInfo(name).key
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise UserError(
            f"{variable} is '{name}', which is not a time zone. Set {TIMEZONE} to an IANA name such as Europe/Berlin "
            "or UTC; schedules follow it."
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _port(variable: str, text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise UserError(f"{variable} must be a port, a number from 1 to 65535, and it is '{text}'.")
    return int(text)


def port(name: str, asked: Settings) -> int:
    """The one that was asked for, or where it was before, or the usual one, or a free one, which is said."""
    variable, usual = PORTS[name]
    if name in asked.ports:
        if not services.is_free(asked.bind, asked.ports[name]):
            raise UserError(
                f"Port {asked.ports[name]} is taken by {services.holder(asked.ports[name])}. Choose another "
                f"{variable}, or leave it out: then a free one is found."
            )
        return asked.ports[name]
    before = services.known(name)
    wanted = [before.port, usual] if before else [usual]
    if found := next((number for number in wanted if services.is_free(asked.bind, number)), None):
        return found
    found = free_port()
    print(
        f"Port {wanted[0]} is taken by {services.holder(wanted[0])}: {TITLES[name]} listens on {found} instead. "
        f"{variable}=number chooses another.",
        flush=True,
    )
    return found


def common(asked: Settings) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    secret = {SECRET: asked.secret, "PREFECT_API_AUTH_STRING": asked.secret}
    inherited = {name: value for name, value in os.environ.items() if name not in ("DPO_WEBHOOK_URL", *secret)}
    env = {**QUIET, **inherited, "PATH": path, "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO", BIND: asked.bind}
    return {**env, **{name: value for name, value in secret.items() if value}}


def prefect(asked: Settings) -> Service:
    services.end_leftovers("prefect")  # of a killed one: they hold its port
    number = port("prefect", asked)
    page = f"http://{_reached_by(asked.bind)}:{number}"
    env = {
        **common(asked),
        "PREFECT_API_URL": f"{page}/api",
        "PREFECT_UI_URL": page,  # links in notifications
        "PREFECT_SERVER_UI_API_URL": "/api",  # of whichever address a browser came by
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_METRICS_ENABLED": "true",  # /api/metrics, behind the login
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,  # in memory, a restart would crash the runs that hold one
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}:{number}" for host in hosts(asked)),
        HOSTS: ",".join(hosts(asked)),
    }
    home = Path(os.environ.get("PREFECT_HOME") or ROOT / ".prefect")
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)  # the database holds the key with which Prefect encrypts secrets
    command = [sys.executable, "-m", "flows.api", "server", "start", "--host", asked.bind, "--port", str(number)]
    return services.start("prefect", command, env, number, page, f"{page}/api/health")


def mlflow(asked: Settings, store: str) -> Service:
    """Pages over the store that runs write to themselves, so that no run needs this server.

    The store's address may hold a password: it goes into the environment, since every user sees arguments.
    """
    services.end_leftovers("mlflow")  # of a killed one: they hold its port
    number = port("mlflow", asked)
    page = f"http://{_reached_by(asked.bind)}:{number}"
    command = [sys.executable, "-m", "tasks.tracking.server", "--host", asked.bind, "--port", str(number)]
    command += ["--workers", "1", "--artifacts-destination", str(ROOT / ".mlflow" / "artifacts")]
    users = {f"DPO_MLFLOW_{user.upper()}_PASSWORD": word for user, word in passwords.mlflow_passwords().items()}
    env = {
        **common(asked),
        **users,
        "DPO_MLFLOW_USERS": f"sqlite:///{services.FOLDER / 'mlflow-users.db'}",
        "MLFLOW_BACKEND_STORE_URI": store,
        **mlflow_names(asked, number),
    }
    return services.start("mlflow", command, env, number, page, f"{page}/health")


def mlflow_names(asked: Settings, number: int) -> dict[str, str]:
    """MLflow checks the host of every request, and the origin of those that a page posts."""
    names = [f"{host}:{number}" for host in hosts(asked)]
    origins = ",".join(f"http://{name}" for name in names)
    return {"MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(names), "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": origins}


def hosts(asked: Settings) -> list[str]:
    """The names under which a browser may ask for our pages: those of this machine, as far as it is open."""
    names = [LOOPBACK, "localhost", "[::1]"]
    if asked.open:
        own = [one.address.partition("%")[0] for found in psutil.net_if_addrs().values() for one in found]
        names += [f"[{address}]" if ":" in address else address for address in own if _is_address(address)]
        own = [socket.gethostname(), socket.getfqdn()]
        names += [*own, *map(str.lower, own), _reached_by(asked.bind)]  # browsers write host names in lower case
    names += [name.strip() for name in os.environ.get(HOSTS, "").split(",") if name.strip()]
    return list(dict.fromkeys(names))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:  # of a network card
        return False
    return True


def worker(asked: Settings, api: str) -> Service:
    number = free_port()
    env = {
        **common(asked),
        "PREFECT_API_URL": api,
        "PREFECT_WORKER_WEBSERVER_HOST": LOOPBACK,  # every interface, as it comes
        "PREFECT_WORKER_WEBSERVER_PORT": str(number),
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # a run begins that much later at most
    }
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    address = f"http://{LOOPBACK}:{number}"
    return services.start("worker", [*command, "--with-healthcheck"], env, number, address, f"{address}/health")


def metrics(asked: Settings) -> Service:
    """For Prometheus, which logs in as MLflow's reader does."""
    services.end_leftovers("metrics")
    number = port("metrics", asked)
    page = f"http://{_reached_by(asked.bind)}:{number}"
    command = [sys.executable, "-m", "flows.metrics", "--host", asked.bind, "--port", str(number)]
    env = {name: value for name, value in common(asked).items() if name != "PREFECT_API_URL"}  # it finds ours itself
    env |= {"DPO_METRICS_PASSWORD": passwords.mlflow_passwords()["reader"], "DPO_HOME": str(ROOT)}
    return services.start("metrics", command, env, number, f"{page}/metrics", f"{page}/health")


def _reached_by(bind: str) -> str:
    """The host of an address that leads to it from here."""
    here = {"0.0.0.0": LOOPBACK, "localhost": LOOPBACK, "::": "::1"}.get(bind, bind)
    return f"[{here}]" if ":" in here else here
