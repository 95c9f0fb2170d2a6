"""`dpo up`: start Prefect, MLflow, a worker and a metrics endpoint in the background.

A second `dpo up` reports what is running and starts what is missing. `dpo down` stops only what `dpo up` started.
"""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from services import background, passwords, prefect_api, stack
from services.background import Service
from services.mlflow_urls import curves_link, runs_link
from services.stack import TITLES, Settings
from tasks.config.cluster import load_cluster
from tasks.config.paths import ROOT
from tasks.errors import UserError
from tasks.system.lock import file_lock
from tasks.tracking.mlflow_client import absolute_uri


def up() -> None:
    stack.read_settings(os.environ)  # reports mistakes before it waits for the lock
    store = load_cluster(ROOT).tracking_uri
    with background.exclusive_lock():
        settings = _settings()
        server = _ensure("prefect", partial(stack.start_prefect, settings))
        mlflow = None if store.startswith("http") else _mlflow(settings, absolute_uri(store))
        metrics = _ensure("metrics", partial(stack.start_metrics, settings))
        access = prefect_api.access_variables(server)
        worker = _provision(server, access, settings)
        for service in filter(None, (mlflow, worker, metrics)):
            background.wait_until_healthy(service, TITLES[service.name])
        has_client = passwords.write_client(access["PREFECT_API_URL"], access["PREFECT_API_AUTH_STRING"])
    _print_addresses(server, mlflow.address if mlflow else store, metrics.address, settings, has_client)
    if not passwords.SHOWN.exists():  # also where an earlier `dpo up` failed before it printed them
        _print_passwords(settings)
        passwords.SHOWN.touch()


def _settings() -> Settings:
    """The settings of the environment, completed by those of the running server, which it cannot change."""
    env, server = dict(os.environ), background.running("prefect")
    if server and not server.environment().get(stack.LOGIN):
        raise UserError("The running Prefect server has no login. Run `dpo down`, then `dpo up`.")
    for name, default in ((stack.BIND, stack.LOOPBACK), (stack.LOGIN, passwords.prefect_login())):
        current = server.environment().get(name) or default if server else env.get(name) or default
        if env.get(name) and env[name] != current:
            raise UserError(
                f"The running Prefect server was started with another {name}. Run `dpo down` first, or unset {name}."
            )
        env[name] = current
    settings = stack.read_settings(env)
    for name, (variable, _) in stack.PORTS.items():
        service = background.running(name)
        if service and settings.ports.get(name, service.port) != service.port:
            raise UserError(
                f"{variable} is {settings.ports[name]}, but the {TITLES[name]} is running on port {service.port}. "
                f"Run `dpo down` first, or unset {variable}."
            )
    return settings


def _ensure(name: str, start: Callable[[], Service]) -> Service:
    """The running service, or the one that `start` starts."""
    if service := background.running(name):
        state = f"running since {service.since:%Y-%m-%d %H:%M:%S}"
    else:
        service, state = start(), "starting"
    print(f"{TITLES[name]}: {state} (process {service.pid})", flush=True)
    return service


def _mlflow(settings: Settings, store: str) -> Service:
    """The first start creates the store; runs that start meanwhile wait (the lock of tasks/tracking/uploader.py)."""
    path = Path(store.removeprefix("sqlite:///"))
    is_new = store.startswith("sqlite:///") and not path.exists()
    with file_lock(path.parent / "store.lock") if is_new else nullcontext():
        service = _ensure("mlflow", partial(stack.start_mlflow, settings, store))
        if is_new:
            background.wait_until_healthy(service, TITLES["mlflow"])
    return service


def _provision(server: Service, access: Mapping[str, str], settings: Settings) -> Service:
    """Create or update work pool, deployments and automations. Returns the worker, which needs the pool."""
    from services import provision  # imports Prefect, which takes seconds while the server starts

    background.wait_until_healthy(server, TITLES["prefect"])
    with provision.connect(access) as client:
        provision.create_pool(client)
        worker = _worker(settings, access["PREFECT_API_URL"])
        provision.provision(client, access, settings)
    return worker


def _worker(settings: Settings, api: str) -> Service:
    """The worker; one that is connected to another server is replaced."""
    service = background.running("worker")
    if service and service.environment().get("PREFECT_API_URL") != api:
        print(f"{TITLES['worker']}: stopped, because the Prefect server has another address now", flush=True)
        background.stop("worker")
    return _ensure("worker", partial(stack.start_worker, settings, api))


def _print_addresses(server: Service, mlflow: str, metrics: str, settings: Settings, has_client: bool) -> None:
    print("\nPages")
    print(f"  Prefect  {server.address}  runs, deployments, schedules, automations")
    print(f"  MLflow   {mlflow}  curves, models, comparisons")
    print(f"  runs     {runs_link(mlflow)}")
    print(f"  curves   {curves_link(mlflow)}")
    print(f"  metrics  {metrics}  for Prometheus (docs/monitoring.md)")
    if settings.is_public:
        print(f"  from other machines: the same ports of {socket.gethostname()}")
    print("In a shell, in this folder\n  source .venv/bin/activate")
    if not has_client:
        print(f"  {passwords.CLIENT.name} was not written by `dpo up` and is left unchanged. For the `prefect` command")
        print(f"  set PREFECT_API_URL={server.address}/api and PREFECT_API_AUTH_STRING=user:password.")
    print("  dpo follow dpo/smoke")
    print("`dpo status` shows the services, `dpo logs` their output; `dpo down` stops them.", flush=True)


def _print_passwords(settings: Settings) -> None:
    mlflow = passwords.mlflow_passwords()
    print(f"\nLogins, shown only this once. {passwords.file()} keeps them; only you can read it")
    print(f"  Prefect  {settings.login}  (enter the whole text in the browser)")
    print(f"  MLflow   reader:{mlflow['reader']}  can view runs and models")
    print(f"           writer:{mlflow['writer']}  can change them", flush=True)
