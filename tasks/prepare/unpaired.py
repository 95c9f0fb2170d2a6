"""Unpaired rows: one answer each, desirable or not. They are stored as pairs whose second answer is another row's.

KTO estimates the KL divergence on answers that belong to other prompts (training.objectives.pair_logps.kl_estimate).
The second answer is that of the next row with another prompt, so that its reference values are computed once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from tasks.artifacts.pairs import PAIR_SCHEMA, open_table, replace_columns
from tasks.config.train import Train
from tasks.errors import UserError
from tasks.prepare.chunks import RowSource
from tasks.prepare.dedup import Columns, Mask
from tasks.prepare.shards import BATCH_ROWS, with_shared_prefixes

SHAPE = "unpaired"


def check_sources(sources: Sequence[RowSource], train: Train | None) -> None:
    """UserError if the sources are of two kinds, or of another kind than the loss."""
    shapes = {source.name: source.layout.shape for source in sources}
    unpaired = [name for name, shape in shapes.items() if shape == SHAPE]
    if unpaired and len(unpaired) < len(shapes):
        others = ", ".join(f"{name} ({shape})" for name, shape in shapes.items() if shape != SHAPE)
        raise UserError(
            f"The rows of {', '.join(unpaired)} are unpaired, and those of {others} are pairs. A training takes one "
            "kind: set prepare.format, or the format in prepare.by_source, to unpaired: two rows of each pair."
        )
    if train:
        try:
            train.check_rows(bool(unpaired))
        except ValueError as error:
            raise UserError(f"{error}.") from error


def check_labels(columns: Columns, kept: Mask) -> None:
    """UserError if the training rows have only one label."""
    signs = columns["sign"][kept & ~columns["held_out"]]
    if len(signs) and abs(int(signs.sum())) == len(signs):
        kind = "desirable" if signs[0] > 0 else "undesirable"
        raise UserError(
            f"All {len(signs)} training rows are {kind}, and KTO needs both kinds: add rows with the other label. To "
            "learn from good answers alone, use them as demonstrations (source.sft, docs/sft.md)."
        )


def add_mismatched(path: Path, max_tokens: int) -> None:
    """Rewrite a file of unpaired rows with their second answers, cut where prompt and answer exceed `max_tokens`."""
    table, written = open_table(path), path.with_suffix(".new")
    answers = table.select(["chosen_ids", "chosen_mask"])
    following = next_with_other_prompt(table["prompt"].to_pylist())
    with pa.ipc.new_stream(written, PAIR_SCHEMA) as writer:
        for start in range(0, len(table), BATCH_ROWS):
            rows = table.slice(start, BATCH_ROWS).combine_chunks()
            others = answers.take(pa.array(following[start : start + BATCH_ROWS]))
            rooms = compute.subtract(max_tokens, compute.list_value_length(rows["prompt_ids"])).to_pylist()
            for name in ("ids", "mask"):
                cut = [values[:room] for values, room in zip(others[f"chosen_{name}"].to_pylist(), rooms, strict=True)]
                rows = replace_columns(rows, {f"rejected_{name}": cut})
            writer.write_table(with_shared_prefixes(rows).combine_chunks())
    written.replace(path)


def next_with_other_prompt(prompts: Sequence[str]) -> list[int]:
    """For each row the next one, from the start again after the last; just the next one if all prompts are equal."""
    count = len(prompts)
    following = [(row + 1) % count for row in range(count)]
    if len(set(prompts)) > 1:
        for number in reversed(range(2 * count - 1)):  # twice: the rows at the end continue at the start
            row, after = number % count, (number + 1) % count
            following[row] = following[after] if prompts[row] == prompts[after] else after
    return following


def compared_rows(signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the rows whose answers a report compares: the n-th desirable with the n-th undesirable, in turn.

    A pair is compared with itself.
    """
    if not signs.any():
        return np.arange(len(signs)), np.arange(len(signs))
    sides = np.flatnonzero(signs > 0), np.flatnonzero(signs < 0)
    count = max(map(len, sides)) if all(map(len, sides)) else 0
    return np.resize(sides[0], count), np.resize(sides[1], count)


def as_pairs(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Rows of data/pairs for the bag-of-words probe: pairs, or desirable and undesirable answers as pairs."""
    signs = np.array([row["sign"] for row in rows])
    if not signs.any():
        return rows
    both = zip(*(numbers.tolist() for numbers in compared_rows(signs)), strict=True)
    return [{"chosen_ids": rows[up]["chosen_ids"], "rejected_ids": rows[down]["chosen_ids"]} for up, down in both]
