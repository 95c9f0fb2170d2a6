"""Compare settings and models: sweeps, comparisons, reproductions."""

from typing import Annotated, Any, Literal

import typer

from cli.options import VERSION, Name, Recipe, Run, Set
from cli.run import interruptible
from tasks.config.strict import parse_overrides


def sweep(
    space: Annotated[
        list[str] | None,
        typer.Option(
            "--space",
            metavar="KEY=VALUES",
            help="Values, train.beta=0.05,0.1, or a range, train.learning_rate=log:1e-5..1e-3. Repeatable.",
        ),
    ] = None,
    random: Annotated[
        int | None, typer.Option("--random", metavar="N", help="Draw N random combinations instead of trying all.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random draws.")] = 0,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="Metric to compare, as MLflow names it.")
    ] = "eval/rewards/accuracies",
    goal: Annotated[Literal["max", "min"], typer.Option(help="Whether a higher or a lower value is better.")] = "max",
    runs_at_once: Annotated[int, typer.Option(metavar="N", help="How many runs work in parallel.")] = 2,
    promote: Annotated[
        bool, typer.Option("--promote", help="At the end, promote the best run's model if it passes the gate.")
    ] = False,
    recipe: Recipe = None,
    set_: Set = None,
    name: Name = None,
) -> None:
    """Run a grid or a random search over values of params.yaml.

    The runs share data and reference log-probabilities. A failed run does not stop the others. Repeat the command to
    continue an interrupted sweep.

    Examples:

    - dpo sweep --space train.beta=0.05,0.1,0.2 --space train.seed=0,1
    - dpo sweep --space train.learning_rate=log:1.0e-6..1.0e-4 --random 8 --metric eval/rewards/margins
    """
    from flows import sweep

    options: dict[str, Any] = {"metric": metric, "goal": goal, "runs_at_once": runs_at_once, "random": random}
    options |= {"seed": seed, "recipe": recipe, "name": name, "promote": promote}
    with interruptible(lambda: "Run the same command again to continue; finished runs are not repeated."):
        code = sweep.run_here(space or [], parse_overrides(set_), **options)
    raise typer.Exit(code)


def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"base, MODEL/base, or {VERSION}")] = "champion",
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="The second model, named like the first.")
    ] = None,
) -> None:
    """Compare two models on the same held-out prompts and pairs, with confidence intervals.

    With one MODEL, it compares the model in this checkout with that one. A model that was evaluated with other settings
    or pairs is evaluated again, with those of the first model.

    Examples:

    - dpo compare champion
    - dpo compare low-kl smollm2-135m-dpo/champion
    """
    from tasks.compare import compare

    compare.print_comparison(other or model, model if other else None)


def reproduce(name: Run) -> None:
    """Run again from a run's commit, without caches, and check that all hashes and metrics are identical."""
    from tasks.lifecycle import reproduce

    reproduce.reproduce(name)


COMMANDS = (sweep, compare, reproduce)
