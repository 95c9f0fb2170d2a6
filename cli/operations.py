"""Commands that start and stop local services and check this machine."""

import os
import subprocess
import sys
from typing import Annotated

import typer

from tasks.config.paths import ROOT
from tasks.errors import UserError


def up(
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on; loopback by default.")
    ] = None,
    prefect_port: Annotated[int | None, typer.Option(help="Port of Prefect's pages and API.")] = None,
    mlflow_port: Annotated[int | None, typer.Option(help="Port of MLflow's pages.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Port of the Prometheus endpoint.")] = None,
) -> None:
    """Start Prefect, MLflow, a worker and the metrics endpoint in the background."""
    from services import stack, up

    ports = {"prefect": prefect_port, "mlflow": mlflow_port, "metrics": metrics_port}
    variables = {stack.BIND: bind, **{stack.PORTS[name][0]: port for name, port in ports.items()}}
    os.environ |= {name: str(value) for name, value in variables.items() if value is not None}
    try:
        up.up()
    except KeyboardInterrupt:
        sys.exit("Stopped waiting. Started services keep running: `dpo up` waits again, `dpo down` stops them.")


def down() -> None:
    """Stop what `dpo up` started."""
    from services.down import down

    down()


def status() -> None:
    """Show services, schedules and the last runs."""
    from services.status import status

    status()


def logs(
    service: Annotated[
        str | None, typer.Argument(metavar="SERVICE", help="prefect, mlflow, worker or metrics; all by default.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
) -> None:
    """Print the last lines of the services' logs."""
    folder = ROOT / ".services"
    files = sorted(folder.glob(f"{service or '*'}.log"))
    if not files:
        existing = ", ".join(path.stem for path in sorted(folder.glob("*.log")))
        hint = f"There are logs of {existing}." if existing else "Start the services with `dpo up`."
        raise UserError(f"There is no log of {service or 'any service'}. {hint}")
    raise typer.Exit(subprocess.run(["tail", "-n", "40", *(["-F"] if follow else []), *map(str, files)]).returncode)


def sync() -> None:
    """Send metrics, artifacts and feedback to MLflow that could not be sent earlier."""
    from tasks.feedback import traces
    from tasks.tracking import uploader

    sent = [uploader.sync(), traces.sync()]
    raise typer.Exit(not all(sent))


def doctor(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Check the machine for this recipe.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Remove stale locks and move damaged records aside.")] = False,
) -> None:
    """Check that this machine is ready and that the configured run fits it."""
    from tasks.doctor import checks

    raise typer.Exit(checks.run_checks(recipe, fix))


COMMANDS = (up, down, status, logs, sync, doctor)
