"""Look at collected feedback."""

from typing import Annotated

import typer


def raters(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Registered model; promote.model_name by default.")
    ] = None,
) -> None:
    """List who gave feedback on a model's answers, how far they agree, and who contradicts the others."""
    from tasks.config.cluster import load_cluster
    from tasks.config.params import load_params
    from tasks.errors import UserError
    from tasks.feedback import raters
    from tasks.tracking import traces

    experiment = traces.experiment_name(model or load_params().promote.model_name)
    if not (found := raters.raters(traces.read(load_cluster(), experiment))):
        raise UserError(f"The experiment {experiment} has no feedback yet. Collect some with `dpo arena`.")
    print(raters.table(found))


COMMANDS = (raters,)
