"""Use a trained model."""

from pathlib import Path
from typing import Annotated

import typer

MODEL = "champion, base, 3, a run, a folder, or MODEL/champion, MODEL/3 and MODEL/base of another registered model"
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling.")]


def chat(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help=f"{MODEL}. Several answer side by side.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
) -> None:
    """Talk to a model in the terminal: this workspace's export, the champion, or any other."""
    from tasks import chat

    chat.chat(models or [], system, max_new_tokens, temperature, top_p)


def generate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One prompt a line: text, or JSON with `prompt`.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help=f"{MODEL[0].upper()}{MODEL[1:]}.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write; FILE.answers.jsonl by default.")
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
) -> None:
    """Answer every prompt of a file, one JSON line each."""
    from tasks import chat

    print(chat.generate(file, model, out, max_new_tokens, temperature, top_p, seed))


COMMANDS = (chat, generate)
