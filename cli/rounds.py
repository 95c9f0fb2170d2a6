"""On-policy rounds, and the demo of the flywheel."""

from typing import Annotated, Literal

import typer

from cli.options import Name, Recipe, Set
from cli.run import interruptible
from tasks.config.strict import parse_overrides


def rounds(
    count: Annotated[int, typer.Argument(metavar="N", help="Number of rounds, finished ones included.")] = 3,
    reference: Annotated[
        Literal["champion", "base"],
        typer.Option(help="Reference model of a round: the champion that it starts from, or always the base model."),
    ] = "champion",
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on after a round whose model was not promoted.")
    ] = False,
    recipe: Recipe = None,
    set_: Set = None,
    name: Name = None,
) -> None:
    """Train in rounds on answers that the champion itself gave: sample, judge, train, promote.

    Each round is a run that starts from the champion of that moment. The judge is sample.judge (docs/on-policy.md).
    Repeat the command to continue interrupted rounds; a larger N adds rounds.

    Examples:

    - dpo rounds 2 --recipe demo
    - dpo rounds 5 --recipe mine --reference base --set sample.answers=8
    """
    from flows import rounds

    with interruptible(lambda: "Run the same command again to continue; finished rounds are not repeated."):
        code = rounds.run_here(count, reference, keep_going, recipe=recipe, overrides=parse_overrides(set_), name=name)
    raise typer.Exit(code)


def flywheel(
    nights: Annotated[
        int, typer.Option(min=1, max=30, help="Nights to train; more nights continue an earlier call.")
    ] = 3,
) -> None:
    """Let programmed users vote in the arena, and train the next champion on their votes, night after night.

    A demo with a tiny model (10 minutes). docs/flywheel.md describes the parts and how to use them with people.
    """
    from services.flywheel import flywheel

    flywheel(nights)


COMMANDS = (rounds, flywheel)
