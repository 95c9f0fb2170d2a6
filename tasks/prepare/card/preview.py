"""Pairs as the model sees them, decoded from their tokens, with those in the loss marked.

`dpo preview` and the data card show prepared pairs, `prepare` and `dpo init` the first rows of each source.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tasks.artifacts.markup import printable, shortened
from tasks.artifacts.models import source_folder
from tasks.artifacts.pairs import pairs_file, read_rows
from tasks.config.params import load_params
from tasks.errors import UserError
from tasks.prepare.chunks import pair_row
from tasks.prepare.rows.messages import to_text
from tasks.prepare.rows.preference import Preference
from tasks.prepare.templates import ChatTemplate
from tasks.prepare.tokenization import tokenize
from tasks.source.reject_reasons import RejectedRow

WIDTH = 160  # characters of a line
SIGNS = {"prompt": "", "chosen": "  + ", "rejected": "  - "}
STYLES = {"prompt": "bold", "chosen": "bold green", "rejected": "bold red"}


def decode_pair(tokenizer: Any, pair: Mapping[str, Any]) -> dict[str, list[tuple[str, bool]]]:
    """Prompt and both responses as pieces of text, each with whether it is in the loss."""
    return {part: _pieces(tokenizer, *tokens) for part, tokens in _parts(pair).items()}


def describe(template: ChatTemplate, preferences: Sequence[Preference]) -> Iterator[str]:
    """A line for the prompt and each answer of these pairs, with the tokens in the loss in «»."""
    for preference, tokens in zip(preferences, tokenize(template, preferences), strict=True):
        if isinstance(tokens, RejectedRow):
            yield shortened(_line(to_text(preference.prompt[-1:])), WIDTH)
            yield f"  rejected: {_line(str(tokens))}"
            continue
        decoded = decode_pair(template.tokenizer, pair_row(preference, tokens, "", 1.0))
        for part, pieces in decoded.items():
            yield SIGNS[part] + shortened(_line(mark_loss(pieces)), WIDTH, tail=0.8 if part == "prompt" else 0.3)


def mark_loss(pieces: Iterable[tuple[str, bool]]) -> str:
    return "".join(f"«{text}»" if in_loss else text for text, in_loss in pieces)


def _line(text: str) -> str:
    return " ".join(printable(text).split())


def _parts(pair: Mapping[str, Any]) -> dict[str, tuple[list[int], list[int]]]:
    """Token ids and loss mask of prompt and responses."""
    parts = {part: (pair[f"{part}_ids"], pair[f"{part}_mask"] or [0] * len(pair[f"{part}_ids"])) for part in STYLES}
    if pair["sign"]:  # an unpaired row has one answer
        return {"prompt": parts["prompt"], "chosen" if pair["sign"] > 0 else "rejected": parts["chosen"]}
    return parts


def _pieces(tokenizer: Any, ids: Sequence[int], loss_mask: Sequence[int]) -> list[tuple[str, bool]]:
    groups = groupby(zip(ids, loss_mask, strict=True), key=lambda token: bool(token[1]))
    return [(tokenizer.decode([token for token, _ in group]), in_loss) for in_loss, group in groups]


def show(count: int) -> None:
    """Print the first pairs of data/pairs/train.arrow."""
    from rich.console import Console
    from rich.text import Text

    from training.models.tokenizer import load_tokenizer  # heavy: transformers

    if not pairs_file("train").exists():
        raise UserError("There are no prepared pairs here. Run `dvc repro prepare`.")
    tokenizer = load_tokenizer(source_folder(load_params().source.model))
    console = Console(soft_wrap=True)
    for pair in read_rows(pairs_file("train"), count):
        console.rule(f"{pair['id']} from {pair['source']}, label {pair['label']:g}, margin {pair['margin']:g}")
        for part, (ids, loss_mask) in _parts(pair).items():
            console.print(f"{part}: {len(ids)} tokens, {sum(loss_mask)} in the loss", style="underline")
            pieces = _pieces(tokenizer, ids, loss_mask)
            console.print(*(Text(text, style=STYLES[part] if in_loss else "dim") for text, in_loss in pieces), sep="")
