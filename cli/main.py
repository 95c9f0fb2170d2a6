"""`dpo COMMAND`: the entry point. Commands import what they need when they run, so that `dpo --help` is fast."""

from typing import Annotated

import typer

from cli import experiments, models, operations, release, rounds, run, runs
from tasks.config import paths
from tasks.system.commands import as_command

app = typer.Typer(
    name="dpo",
    help="Align a language model with preference data, from raw pairs to a registered model.\n\n"
    "Settings are in params.yaml (what is trained) and infra/cluster.yaml (where it runs).",
    epilog="First steps: `dpo run --recipe demo` trains a tiny model in 3 minutes. Then `dpo up` shows its curves in "
    "MLflow. `dpo init DATA MODEL` prepares a run on your own data (docs/own-data.md).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, module in (
    ("Run the pipeline", run),
    ("Run the pipeline", rounds),
    ("Experiments", experiments),
    ("Runs and data", runs),
    ("Release a model", release),
    ("Use a model", models),
    ("Services", operations),
):
    for command in module.COMMANDS:
        app.command(rich_help_panel=panel)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(paths.version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, help="Print the version.")] = False,
) -> None:
    pass


@as_command
def main() -> None:
    app(prog_name="dpo")
