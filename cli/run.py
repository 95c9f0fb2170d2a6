"""Prepare, start, resume and follow runs of the pipeline."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from cli.options import Name, Recipe, Run, Set
from cli.plan import plan
from tasks.config.strict import parse_overrides
from tasks.errors import UserError

Unregistered = Annotated[bool, typer.Option("--unregistered", help="Do not register the model in MLflow's registry.")]


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


def run(recipe: Recipe = None, set_: Set = None, name: Name = None, unregistered: Unregistered = False) -> None:
    """Run all stages, then register the model and promote it if it passes the gate.

    Stages whose inputs did not change are not run again. With --recipe, --set or --name the run works in a git
    worktree of its own, so several runs can work at the same time; `dpo runs` lists them.

    Examples:

    - dpo run --recipe demo
    - dpo run --name higher-beta --set train.beta=0.2 --set 'train.loss={ipo: 1.0}'
    """
    _run(recipe=recipe, overrides=parse_overrides(set_), name=name, registered=not unregistered)


def resume(name: Run, set_: Set = None, unregistered: Unregistered = False) -> None:
    """Continue a run that failed, was stopped or crashed.

    It keeps its code and parameters, except for the values that --set changes. Finished stages whose parameters did
    not change are not repeated, and training continues at its last checkpoint.
    """
    _run(resume=name, overrides=parse_overrides(set_), registered=not unregistered)


def retrain(recipe: Recipe = None, set_: Set = None) -> None:
    """Run only if data, parameters or code changed since the last finished run.

    The scheduled deployment dpo/nightly does the same. The run stops before training if the data has drifted
    (docs/retraining.md).
    """
    _run(recipe=recipe, overrides=parse_overrides(set_), only_if_new=True)


def follow(
    deployment: Annotated[
        str,
        typer.Argument(
            metavar="DEPLOYMENT",
            help="The deployment to start: dpo/full, dpo/smoke, dpo/nightly, sweep/grid or rounds/on-policy.",
        ),
    ] = "dpo/full",
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="RUN", help="Follow this run, by its name or Prefect id, instead of starting one."
        ),
    ] = None,
    recipe: Recipe = None,
    set_: Set = None,
    name: Name = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="KEY=VALUE", help="Another parameter of the flow. Repeatable."),
    ] = None,
) -> None:
    """Start a run on a worker of `dpo up`, or follow one, and show its progress.

    Ctrl-C stops the display; the run continues.
    """
    from flows import follow

    parameters = parse_overrides(parameter)
    parameters |= {key: value for key, value in (("recipe", recipe), ("name", name)) if value}
    if set_:
        parameters["overrides"] = parse_overrides(set_)
    if code := follow.follow_or_start(deployment, run, parameters):
        raise typer.Exit(code)


def _run(**arguments: Any) -> None:
    """Run the flow in this process. Every error names how to continue the run."""
    with interruptible(_next_command):
        from flows import dpo
        from flows.stage import StageFailed
        from tasks.system import disk

        try:
            dpo.run_here(**arguments)
        except UserError as error:
            sys.exit(f"error: {error}{_after_mistake()}")
        except StageFailed as error:
            sys.exit(f"error: {error}\nIts output is above. {_next_command()}")
        except OSError as error:
            if (sentence := disk.explain(error)) is None:
                raise
            sys.exit(f"error: {sentence}\nThen {_next_command()}")


@contextmanager
def interruptible(next_command: Callable[[], str]) -> Iterator[None]:
    """A flow that is cancelled or interrupted ends the command with `next_command`: how to continue."""
    signal.signal(signal.SIGTERM, terminated)
    from prefect.exceptions import CancelledRun

    try:
        yield
    except CancelledRun as error:
        sys.exit(f"{error} {next_command()}")
    except KeyboardInterrupt:
        print(f"Stopped. {next_command()}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def terminated(number: int, frame: object) -> None:
    """On SIGTERM: leave by an exception, so that child processes are ended."""
    raise SystemExit(128 + number)


def _next_command() -> str:
    name = _own_run()
    return f"`dpo resume {name}` continues the run." if name else "Run the same command again to continue."


def _after_mistake() -> str:
    """The next command after a user error: the run's worktree keeps its values unless they are set anew."""
    if not (name := _own_run()):
        return ""
    return (
        f"\nThen `dpo resume {name}` continues the run. It keeps its values; to change one, add it: "
        f"`dpo resume {name} --set train.beta=0.2`."
    )


def _own_run() -> str | None:
    """This process's run if it has a worktree of its own."""
    from tasks.runs import records

    own = (record.name for record in records.all_records() if record.pid == os.getpid() and record.has_worktree)
    return next(own, None)


COMMANDS = (init, run, resume, plan, retrain, follow)
