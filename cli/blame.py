"""Trace a model's behaviour back to its data: harmful pairs, and the rows of one person."""

from typing import Annotated

import typer

from cli.options import VERSION


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
    from tasks.evaluation import blame

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


COMMANDS = (blame, forget)
