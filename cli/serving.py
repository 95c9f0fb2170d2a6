"""Serve a model and collect feedback."""

from typing import Annotated

import typer

from cli.chat import MODEL


def serve(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help=f"{MODEL}. An alias is followed.")] = "champion",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    challenger: Annotated[str | None, typer.Option(help="A second model, which gets a share of the requests.")] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="The challenger's share of the requests.")] = 0.1,
    rate: Annotated[int, typer.Option(min=1, help="Requests a minute of each token.")] = 600,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 1024,
) -> None:
    """Serve the champion behind an OpenAI-compatible endpoint, swap it when the alias moves, and take feedback."""
    from services.serving.serve import serve

    serve(model, host, port, challenger, share, rate, max_tokens)


COMMANDS = (serve,)
