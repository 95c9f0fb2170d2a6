"""Show the flywheel."""

from typing import Annotated

import typer


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


COMMANDS = (flywheel,)
