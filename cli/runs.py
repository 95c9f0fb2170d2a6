"""List, open and delete runs; inspect their data, DVC's cache and the configuration."""

from pathlib import Path
from typing import Annotated

import typer

from cli.options import VERSION


def runs() -> None:
    """List all runs with their state, start time, model, executed stages and MLflow page."""
    from services.status import show_runs

    show_runs()


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
    from tasks.runs.records import WORKTREES

    opened = open_run(name, folder)
    remove = f"`git worktree remove --force {opened}` removes it again."
    if opened.is_relative_to(WORKTREES):
        remove = f"It is the worktree of an unfinished run and stays until `dpo resume {opened.name}` has finished it."
    print(f"{name} is in {opened}\n{remove}")


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


def preview(count: Annotated[int, typer.Argument(metavar="N", help="How many pairs to show.")] = 3) -> None:
    """Show prepared pairs as the model sees them; tokens in the loss are highlighted."""
    from tasks.prepare.card import preview

    preview.show(count)


def check_cache(
    fix: Annotated[bool, typer.Option("--fix", help="Remove damaged objects.")] = False,
) -> None:
    """Check that every object in DVC's cache matches its hash."""
    from tasks.runs import dvc

    dvc.check_cache(fix)


def check_config(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Print the values with this recipe.")] = None,
) -> None:
    """Check params.yaml and infra/cluster.yaml for mistakes; with a recipe, print the resulting values."""
    import yaml

    from tasks.runs import run_config

    config = run_config.resolve(recipe, None, Path())
    if recipe:
        print(yaml.safe_dump(config.content, sort_keys=False), end="")
    else:
        print("params.yaml and infra/cluster.yaml are valid.")


def blame(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A finished run, champion, MODEL/3, ...; this checkout by default."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help=f"Explain what got worse compared with {VERSION}"),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", min=1, help="How many pairs to show.")] = 20,
) -> None:
    """Find the training pairs that work against the held-out pairs.

    Writes the scores of all pairs, and the flagged pairs as a file for `source.exclude`.

    Examples:

    - dpo blame
    - dpo blame low-kl --against champion
    """
    from tasks.compare import blame

    blame.blame(run, against, count)


def forget(
    user: Annotated[str, typer.Option(metavar="NAME", help="The person, as the column `user` of the rows names them.")],
    yes: Annotated[bool, typer.Option("--yes", help="Erase; without this option nothing is deleted.")] = False,
) -> None:
    """Erase a person's feedback, and the runs, data and models made from their rows (dry run by default).

    The current champion is kept until a new one replaces it; the command says how. Then repeat the command.
    """
    from tasks.lifecycle import forget

    forget.forget(user, yes)


COMMANDS = (runs, open_, gc, preview, check_cache, check_config, blame, forget)
