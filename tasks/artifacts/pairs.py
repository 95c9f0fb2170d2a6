"""Pairs and reference log-probabilities on disk: Arrow files, memory-mapped, so that processes of a host share them.

The files are Arrow streams, which `datasets.Dataset.from_file` opens too.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from tasks.config.paths import PAIRS, REFERENCE
from tasks.errors import UserError
from tasks.system.files import read_json, sha256
from training.pairs.pair import Pair
from training.pairs.pair_columns import PairColumns

SPLITS = ("train", "eval")
SFT_PREFIX = "sft-"  # of the files with demonstrations of source.sft, beside the pairs
HASHES = "hashes.json"  # of the files in data/pairs
TOKENS = ("prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")  # columns, and fields of a Pair
NUMBERS = ("label", "margin", "weight", "sign")

PAIR_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("prompt_mask", pa.list_(pa.int8())),  # empty if no token of the prompt is in the loss
        ("chosen_ids", pa.list_(pa.int32())),
        ("chosen_mask", pa.list_(pa.int8())),
        ("rejected_ids", pa.list_(pa.int32())),
        ("rejected_mask", pa.list_(pa.int8())),
        ("shared_prefix", pa.int32()),  # number of tokens that both answers start with (Pair.shared_prefix)
        ("label", pa.float32()),  # probability that chosen is the better answer
        ("margin", pa.float32()),  # difference of the scores, where the data has scores
        ("weight", pa.float32()),
        ("source", pa.string()),
        ("sign", pa.int8()),  # of an unpaired row: +1 chosen is desirable, -1 undesirable; rejected answers another row
    ]
)
REFERENCE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("chosen_logps", pa.list_(pa.float32())),
        ("rejected_logps", pa.list_(pa.float32())),
    ]
)


def pairs_file(split: str, root: Path = Path()) -> Path:
    return root / PAIRS / f"{split}.arrow"


def reference_file(split: str, root: Path = Path()) -> Path:
    return root / REFERENCE / f"{split}.arrow"


def check(path: Path, stage: str) -> None:
    """UserError if a file is not what its stage wrote: DVC does not verify the files that it checks out."""
    manifest = path.parent / (HASHES if stage == "prepare" else "manifest.json")
    if manifest.exists() and read_json(manifest)["files"].get(path.name) != sha256(path):
        raise UserError(
            f"{path} is not what the {stage} stage wrote: its content hash is not that of {manifest}. If nobody edited "
            f"it, DVC's cache is damaged: run `dpo check-cache --fix`, which removes damaged objects, and try again."
        )


def check_inputs() -> None:
    """Before workers start: check that their inputs are what the stages wrote."""
    for split in SPLITS:
        check(pairs_file(split), "prepare")
        check(reference_file(split), "reference")


def open_table(path: Path) -> pa.Table:
    """A file's columns. They are read from disk when they are used."""
    path.stat()  # the error of a missing file names it, which pyarrow's does not
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def replace_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    return pa.table({name: columns.get(name, table[name]) for name in table.column_names}, schema=table.schema)


def read_rows(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """All rows, or the first `count`."""
    return open_table(path).slice(0, count).to_pylist()


def read_pairs(split: str, reference: bool = False) -> "PairTable":
    """The pairs that `prepare` wrote, with the reference log-probabilities that `reference` wrote if requested."""
    check(pairs_file(split), "prepare")
    pairs = PairTable(open_table(pairs_file(split)))
    if not reference:
        return pairs
    check(reference_file(split), "reference")
    return pairs.with_reference(open_table(reference_file(split)))


class ListColumn:
    """A column of lists; a row's values are a view of the file."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.chunks = [(chunk.offsets.to_numpy(), chunk.values.to_numpy()) for chunk in column.chunks]
        self.starts = np.cumsum([0, *map(len, column.chunks)])

    def __getitem__(self, row: int) -> np.ndarray:
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        (offsets, values), row = self.chunks[number], row - int(self.starts[number])
        return values[offsets[row] : offsets[row + 1]]

    def lengths(self) -> np.ndarray:
        counts = [np.diff(offsets) for offsets, _ in self.chunks]
        return np.concatenate([np.zeros(0, np.int64), *counts]).astype(np.int64)


class PairTable(Sequence[Pair]):
    """The pairs of a file, or some of them. A Pair is built when it is read."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.rows = table, np.arange(len(table))
        self.lists = {name: ListColumn(table[name]) for name in TOKENS}
        masks = ListColumn(table["prompt_mask"])
        self.prompt_masks = masks if masks.lengths().any() else None

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, number: int) -> Pair: ...
    @overload
    def __getitem__(self, number: slice) -> list[Pair]: ...
    def __getitem__(self, number: int | slice) -> Pair | list[Pair]:
        if isinstance(number, slice):
            return [self._pair(int(row)) for row in self.rows[number]]
        return self._pair(int(self.rows[number]))

    def _pair(self, row: int) -> Pair:
        fields: dict[str, Any] = {name: column[row] for name, column in self.lists.items()}
        fields |= {name: float(self.table[name][row].as_py()) for name in NUMBERS}
        pair = Pair(self.table["id"][row].as_py(), **fields)
        return _with_prompt_loss(pair, self.prompt_masks[row]) if self.prompt_masks else pair

    @cached_property
    def columns(self) -> PairColumns:
        prompt, chosen, rejected = (self.lists[name].lengths() for name in TOKENS[:3])
        shared = self.table["shared_prefix"].to_numpy().astype(np.int64)
        if self.prompt_masks:  # as _with_prompt_loss moves the prompt's tokens in the loss
            masks = (self.prompt_masks[row] for row in range(len(self.table)))
            moved = np.array([len(mask) - int(mask.argmax()) if mask.any() else 0 for mask in masks])
            prompt, chosen, rejected, shared = prompt - moved, chosen + moved, rejected + moved, shared + moved
        numbers = [self.table[name].to_numpy().astype(float) for name in NUMBERS]
        return PairColumns(prompt, chosen, rejected, shared, *numbers)

    def by_source(self) -> dict[str, "PairTable"]:
        """The pairs of each source, in the order in which the sources appear."""
        names = self.table["source"].to_numpy()[self.rows]
        return {name: self.select(np.flatnonzero(names == name)) for name in dict.fromkeys(names.tolist())}

    def select(self, numbers: np.ndarray) -> "PairTable":
        part = copy(self)
        part.columns, part.rows = self.columns.select(numbers), self.rows[numbers]
        return part

    def with_reference(self, logps: pa.Table) -> "PairTable":
        """The pairs with their reference log-probabilities, which are in the same order."""
        if not self.table["id"].equals(logps["id"]):
            raise UserError(
                "These pairs have no reference log-probabilities: they changed after `reference` ran. Run `dvc repro "
                "reference`."
            )
        joined = copy(self)
        joined.lists = self.lists | {f"ref_{name}": ListColumn(logps[name]) for name in logps.column_names[1:]}
        return joined


def _with_prompt_loss(pair: Pair, prompt_mask: np.ndarray) -> Pair:
    """The pair with both responses starting at the first prompt token in the loss, since that token is predicted too.

    Tokens that both responses start with are computed once, so this costs no more than a prompt.
    """
    if not prompt_mask.any():
        return pair
    first = int(prompt_mask.argmax())
    assert first > 0, f"pair {pair.id}: nothing predicts the first token of a prompt"
    counted, mask = pair.prompt_ids[first:], prompt_mask[first:]
    return replace(
        pair,
        prompt_ids=pair.prompt_ids[:first],
        chosen_ids=np.concatenate([counted, pair.chosen_ids]),
        rejected_ids=np.concatenate([counted, pair.rejected_ids]),
        chosen_mask=np.concatenate([mask, pair.chosen_mask]),
        rejected_mask=np.concatenate([mask, pair.rejected_mask]),
    )
