"""Commands that release an exported model."""

from typing import Annotated

import typer

from cli.options import VERSION

# Each command imports its code when it runs, so that `dpo --help` is fast.


def promote() -> None:
    """Register data/model, and make it champion if it passes the gate (after `dvc repro`)."""
    from tasks.run_stage import main

    main(["promote"])


def approve(
    version: Annotated[str, typer.Argument(metavar="VERSION", help=VERSION)],
    by: Annotated[str, typer.Argument(metavar="NAME", help="Who approves; recorded with the version.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why to override the gate; stored with the version.")
    ] = "",
) -> None:
    """Promote a version that waits for approval. With --reason, promote a version that the gate rejected."""
    from tasks.promote import champion

    print(champion.approve(version, by, reason))


def rollback(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A registered model, by its name or by that of its recipe or a run."),
    ] = None,
) -> None:
    """Make the previous champion the champion again."""
    from tasks.promote import champion

    champion.print_rollback(model)


def verify(what: Annotated[str, typer.Argument(metavar="WHAT", help=f"A folder, or {VERSION}")] = "") -> None:
    """Check every file of an export (data/model by default) or a version against its signed manifest."""
    from tasks.promote import sign

    sign.print_verification(what)


def sign(what: Annotated[str, typer.Argument(metavar="WHAT", help=f"A folder, or {VERSION}")] = "") -> None:
    """Sign an export (data/model by default), checkpoint or version that was made without your key."""
    from tasks.promote import sign

    print(sign.sign(what))


def push(
    to: Annotated[str, typer.Argument(metavar="ADDRESS", help="Any fsspec address: s3://bucket/models.")],
    version: Annotated[str | None, typer.Argument(metavar="VERSION", help=VERSION)] = None,
) -> None:
    """Copy data/model or a registered version to an object store or folder."""
    from tasks.promote import push

    print(f"copied to {push.push_model(to, version)}")


def report() -> None:
    """Write the report page of the last result to .scratch/report.html."""
    from tasks.reports import run_report

    run_report.write()


COMMANDS = (promote, approve, rollback, verify, sign, push, report)
