"""`make up`: Prefect's and MLflow's server, a worker and a metrics endpoint in the background, as runs need them.

Run again it says what runs already and brings back what is missing. `make down` ends what this started, and no more.
"""

import importlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flows import ROOT, passwords, services, stack
from flows.links import curves_link, runs_link
from flows.services import Service
from flows.stack import POOL, TITLES, Settings
from tasks.errors import UserError
from tasks.machines.flock import locked
from tasks.output import as_command

PROJECT_SHELL = "source .venv/bin/activate"


def up() -> None:
    from tasks.params import load_cluster

    stack.settings(os.environ)  # a mistake is told before anybody is waited for
    store = load_cluster(ROOT).tracking_uri
    with services.one_at_a_time():
        first = not passwords.FILE.exists()
        asked = _settings()
        server = _start_or_say("prefect") or _say(stack.prefect(asked))
        mlflow = None if store.startswith("http") else _mlflow(asked, store)
        metrics = _start_or_say("metrics") or _say(stack.metrics(asked))
        access = services.prefect_access(server)
        importlib.import_module("flows.equip")  # takes seconds, in which the server starts
        services.wait_for(server, TITLES["prefect"])
        worker = _equip(access, asked)
        for service in filter(None, (mlflow, worker, metrics)):
            services.wait_for(service, TITLES[service.name])
        found = passwords.write_client(access["PREFECT_API_URL"], access["PREFECT_API_AUTH_STRING"])
    _say_where(server, mlflow.address if mlflow else store, metrics.address, asked, found)
    if first:
        _say_passwords(asked)


def _settings() -> Settings:
    """What is asked for: what runs already is not moved, and a shell that does not know its password may ask too."""
    env, server = dict(os.environ), services.running("prefect")
    if server and not server.environment().get(stack.SECRET):
        raise UserError("Prefect's server runs without a login. Run `make down`, then `make up` again.")
    for name, usual in ((stack.BIND, stack.LOOPBACK), (stack.SECRET, passwords.prefect_login())):
        runs = server.environment().get(name) or usual if server else env.get(name) or usual
        if env.get(name) and env[name] != runs:
            raise UserError(f"Prefect's server runs already, with another {name}. Run `make down` first, or unset it.")
        env[name] = runs
    asked = stack.settings(env)
    for name, (variable, _) in stack.PORTS.items():
        service = services.running(name)
        if service and asked.ports.get(name, service.port) != service.port:
            raise UserError(
                f"{TITLES[name]} runs on port {service.port} already, and {variable} is {asked.ports[name]}. "
                "Run `make down` first, or leave it out."
            )
    return asked


def _start_or_say(name: str) -> Service | None:
    """The one that runs, which is said; None where one must be started."""
    service = services.running(name)
    if service:
        print(
            f"{TITLES[name]} runs already, since {service.since:%Y-%m-%d %H:%M:%S} (process {service.pid})", flush=True
        )
    return service


def _say(service: Service) -> Service:
    print(f"Starting {TITLES[service.name]} (process {service.pid})", flush=True)
    return service


def _mlflow(asked: Settings, store: str) -> Service:
    from tasks.tracking.journal import absolute

    with _making(absolute(store)) as fresh:
        service = _start_or_say("mlflow") or _say(stack.mlflow(asked, absolute(store)))
        if fresh:
            services.wait_for(service, TITLES["mlflow"])
    return service


@contextmanager
def _making(store: str) -> Iterator[bool]:
    """Yields whether the store is still to be made; a run that begins meanwhile waits (tasks/tracking/forward.py)."""
    path = Path(store.removeprefix("sqlite:///"))
    if not store.startswith("sqlite:///") or path.exists():
        yield False
        return
    with locked(path.parent / "store.lock"):
        yield True


def _worker(access: Mapping[str, str]) -> Service | None:
    """The one that runs, unless it works for a server that is no more."""
    service = services.running("worker")
    if service and service.environment().get("PREFECT_API_URL") != access["PREFECT_API_URL"]:
        print(f"{TITLES['worker']} works for a server that is gone; it is ended", flush=True)
        services.end("worker")
    return _start_or_say("worker")


def _equip(access: Mapping[str, str], asked: Settings) -> Service:
    """Work pool, worker, deployments, automations: what is not there yet, or not as it should be."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    from flows import deploy, equip

    secret = access.get("PREFECT_API_AUTH_STRING")
    settings = temporary_settings({PREFECT_API_URL: access["PREFECT_API_URL"], PREFECT_API_AUTH_STRING: secret})
    with settings, get_client(sync_client=True) as client:
        deploy.make_pool(client, POOL)
        worker = _worker(access) or _say(stack.worker(asked, access["PREFECT_API_URL"]))
        equip.equip(client, access, asked)
    return worker


def _say_where(server: Service, mlflow: str, metrics: str, asked: Settings, found: bool) -> None:
    print("\nPages")
    print(f"  Prefect  {server.address}  runs, deployments, schedules, automations")
    print(f"  MLflow   {mlflow}  curves, models, compare")
    print(f"  runs     {runs_link(mlflow)}")
    print(f"  curves   {curves_link(mlflow)}")
    print(f"  metrics  {metrics}  for Prometheus (docs/monitoring.md)")
    if asked.open:
        print(f"  from elsewhere: the same ports of {socket.gethostname()}")
    print(f"In a shell, in this folder\n  {PROJECT_SHELL}")
    if not found:
        print(f"  {passwords.CLIENT.name} is not ours and stays as it is. Set PREFECT_API_URL={server.address}/api and")
        print("  PREFECT_API_AUTH_STRING=user:password instead.")
    print("  make follow DEPLOYMENT=dpo/smoke")
    print("`make status` says what runs, `make logs` what they say; `make down` ends them.", flush=True)


def _say_passwords(asked: Settings) -> None:
    """Once: whoever needs them later reads the file."""
    mlflow = passwords.mlflow_passwords()
    print(f"\nLogins, shown this once; they stay in {passwords.FILE.relative_to(ROOT)}, which only you can read")
    print(f"  Prefect  {asked.secret}  (in the browser: this whole text)")
    print(f"  MLflow   reader:{mlflow['reader']}  to look at runs and models")
    print(f"           writer:{mlflow['writer']}  to change them", flush=True)


@as_command
def main() -> None:
    try:
        up()
    except KeyboardInterrupt:
        sys.exit("Stopped waiting. What was started goes on: `make up` again waits for it, `make down` ends it.")


if __name__ == "__main__":
    main()
