"""Prepared pairs as the model sees them, the tokens that count in colour.

python -m tasks.dataset.preview       # three pairs of data/pairs/train.parquet
python -m tasks.dataset.preview 10
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tasks.errors import UserError
from tasks.paths import PAIRS


def spans(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether its tokens count."""
    groups = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [(tokenizer.decode([token for token, _ in group]), counts) for counts, group in groups]


def parts(tokenizer: Any, pair: Mapping[str, Any]) -> dict[str, list[tuple[str, bool]]]:
    """Prompt and both responses in such pieces."""
    prompt = {"prompt": spans(tokenizer, pair["prompt_ids"], pair["prompt_mask"] or [0] * len(pair["prompt_ids"]))}
    sides = {side: spans(tokenizer, pair[f"{side}_ids"], pair[f"{side}_mask"]) for side in ("chosen", "rejected")}
    return prompt | sides


def main() -> None:
    from rich.console import Console
    from rich.text import Text

    from tasks.dataset.shards import first_pairs
    from tasks.models import base_folder
    from tasks.params import load_params
    from training.model import load_tokenizer

    if not (PAIRS / "train.parquet").exists():
        raise UserError("There are no prepared pairs here. Run `dvc repro prepare`.")
    count = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 3
    tokenizer = load_tokenizer(base_folder(load_params().source.model))
    console = Console(soft_wrap=True)
    colours = {"prompt": "bold", "chosen": "bold green", "rejected": "bold red"}
    for pair in first_pairs(PAIRS / "train.parquet", count):
        console.rule(f"{pair['id']} from {pair['source']}, label {pair['label']:g}, margin {pair['margin']:g}")
        for name, pieces in parts(tokenizer, pair).items():
            counted = sum(pair[f"{name}_mask"])
            console.print(f"{name}: {len(pair[f'{name}_ids'])} tokens, {counted} count", style="underline")
            console.print(*(Text(text, style=colours[name] if counts else "dim") for text, counts in pieces), sep="")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
