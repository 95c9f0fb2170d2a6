"""`dpo init`: a recipe for your data and model."""

from typing import Annotated

import typer

from cli.options import Set
from tasks.config.strict import parse_overrides


def init(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A file, a folder, s3://... or hub:owner/name@revision.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or hub:owner/name@revision.")],
    full: Annotated[bool, typer.Option("--full/--lora", help="Train all weights, or a LoRA adapter.")] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", "-n", metavar="NAME", help="Name of the recipe; by data and model by default."),
    ] = None,
    set_: Set = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing recipe.")] = False,
) -> None:
    """Look at your data, your model and this machine, and write a recipe with a reason for each value.

    Prints what it found, three pairs with the chosen answer marked, and the command to run next. Trains nothing.

    Examples:

    - dpo init pairs.jsonl hub:HuggingFaceTB/SmolLM2-135M-Instruct --name helper
    - dpo init pairs.csv models/mine --full --set 'prepare.columns={prompt: question, chosen: good, rejected: bad}'
    """
    from tasks.init import recipe

    recipe.init(data, model, name, full, parse_overrides(set_), force)
