"""Use a trained model: talk to it, serve it, let people compare answers, and look at their feedback."""

from pathlib import Path
from typing import Annotated

import typer

MODEL = (
    "champion, base, 3, a run, a folder, hub:owner/name, or MODEL/champion, MODEL/3 and MODEL/base of another "
    "registered model"
)
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


def arena(
    champion: Annotated[str, typer.Argument(metavar="CHAMPION", help=f"{MODEL}.")] = "champion",
    challenger: Annotated[
        str | None,
        typer.Argument(metavar="CHALLENGER", help="The same names. Without it, two samples of one model compete."),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="One prompt a line: text, or JSON with `prompt`.")] = None,
    traces: Annotated[bool, typer.Option("--traces", help="Also the prompts of the model's traces in MLflow.")] = False,
    overlap: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of comparisons that every rater gets, to measure agreement.")
    ] = 0.2,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    feedback_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Registered model under which feedback on unregistered models is kept; promote.model_name by default.",
        ),
    ] = None,
    rater_token: Annotated[
        str | None,
        typer.Option(envvar="DPO_ARENA_TOKEN", help="Raters log in with it; generated and kept by default."),
    ] = None,
    bind: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the page.")] = 8600,
) -> None:
    """Serve a page on which people vote which of two answers is better, blind and in random order."""
    from services.arena.server import serve

    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    serve((champion, challenger), prompts, traces, sampling, overlap, rater_token, (bind, port), feedback_model)


def serve(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help=f"{MODEL}. An alias is followed.")] = "champion",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    challenger: Annotated[str | None, typer.Option(help="A second model, which gets a share of the requests.")] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="The challenger's share of the requests.")] = 0.1,
    rate: Annotated[int, typer.Option(min=1, help="Requests a minute of each token.")] = 600,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 1024,
    patience: Annotated[
        int, typer.Option(min=1, help="Seconds of silence after which an engine whose client has left starts again.")
    ] = 60,
) -> None:
    """Serve the champion behind an OpenAI-compatible endpoint, swap it when the alias moves, and take feedback."""
    from services.serving.serve import serve

    serve(model, host, port, challenger, share, (rate, max_tokens, patience))


def raters(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Registered model; promote.model_name by default.")
    ] = None,
) -> None:
    """List who gave feedback on a model's answers, how far they agree, and who contradicts the others."""
    from tasks.config.cluster import load_cluster
    from tasks.config.params import load_params
    from tasks.errors import UserError
    from tasks.feedback import raters, traces

    experiment = traces.experiment_name(model or load_params().promote.model_name)
    summaries = raters.raters(traces.read(load_cluster(), experiment))
    if not summaries:
        raise UserError(f"The experiment {experiment} has no feedback yet. Collect some with `dpo arena`.")
    print(raters.table(summaries))


COMMANDS = (chat, generate, arena, serve, raters)
