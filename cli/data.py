"""Inspect prepared data, DVC's cache and the configuration."""

from typing import Annotated

import typer


def preview(count: Annotated[int, typer.Argument(metavar="N", help="How many pairs to show.")] = 3) -> None:
    """Show prepared pairs as the model sees them; tokens in the loss are highlighted."""
    from tasks.dataset.card import preview

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
    """Check params.yaml and infra/cluster.yaml for mistakes."""
    from tasks.config import params

    params.show(recipe)


COMMANDS = (preview, check_cache, check_config)
