"""List, open and delete runs."""

from pathlib import Path
from typing import Annotated

import typer


def runs() -> None:
    """List all runs with their state, start time, model, executed stages and MLflow page."""
    from services import run_list

    run_list.show()


def open_(
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run, as `dpo runs` lists it, or champion, MODEL/3, ...")
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Folder to create; .scratch/open/RUN by default.")
    ] = None,
) -> None:
    """Check out a run's code, parameters, data and model in a folder."""
    from tasks.runs.open_run import open_run

    opened = open_run(name, folder)
    print(f"{name} is in {opened}\n`git worktree remove --force {opened}` removes it again.")


open_.__name__ = "open"


def gc(
    keep: Annotated[int, typer.Option(metavar="N", help="Keep the N newest runs.")] = 10,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without this option nothing is deleted.")] = False,
) -> None:
    """Delete data of old runs that nothing references (dry run by default).

    Keeps running runs, the N newest, those with a git tag or the MLflow tag `keep`, and those behind an alias of the
    registry such as champion.
    """
    from tasks.runs import gc

    gc.collect(keep, yes)


COMMANDS = (runs, open_, gc)
