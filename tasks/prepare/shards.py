"""Writes data/pairs: one Arrow file per chunk first, then one per split in the order of the rows."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.artifacts.pairs import PAIR_SCHEMA, SPLITS, replace_columns

BATCH_ROWS = 8192  # of a record batch


def write_shard(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of PAIR_SCHEMA, whose shared prefixes are computed here."""
    table = pa.Table.from_pylist(rows, schema=PAIR_SCHEMA)
    with pa.ipc.new_file(path, PAIR_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(with_shared_prefixes(table))


def read_shard(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def write_splits(
    folder: Path,
    shards: Sequence[Path],
    kept: Sequence[NDArray[Any]],
    held_out: Sequence[NDArray[Any]],
    prefix: str = "",
) -> None:
    """train.arrow and eval.arrow from the shards, with the masks of their kept and held-out rows."""
    for split in SPLITS:
        masks = [keep & (held == (split == "eval")) for keep, held in zip(kept, held_out, strict=True)]
        tables = (
            read_shard(path).filter(pa.array(mask)) for path, mask in zip(shards, masks, strict=True) if mask.any()
        )
        path = folder / f"{prefix}{split}.arrow"
        with pa.ipc.new_stream(path, PAIR_SCHEMA) as writer:  # not compressed: it is memory-mapped
            for batch in _batches(tables):
                writer.write_table(batch.combine_chunks())


def count_splits(held_out: NDArray[np.bool_]) -> dict[str, int]:
    """Rows of each split, from the mask of held-out rows."""
    return {"train": int((~held_out).sum()), "eval": int(held_out.sum())}


def _batches(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of BATCH_ROWS."""
    waiting = PAIR_SCHEMA.empty_table()
    for table in tables:
        waiting = pa.concat_tables([waiting, table])
        while len(waiting) >= BATCH_ROWS:
            yield waiting.slice(0, BATCH_ROWS)
            waiting = waiting.slice(BATCH_ROWS)
    if len(waiting):
        yield waiting


def with_shared_prefixes(table: pa.Table) -> pa.Table:
    shared = shared_prefixes(*(table[name].combine_chunks() for name in ("chosen_ids", "rejected_ids")))
    return replace_columns(table, {"shared_prefix": shared.astype(np.int32)})


def shared_prefixes(chosen: pa.ListArray, rejected: pa.ListArray) -> NDArray[np.int64]:
    """Pair.shared_prefix of all rows at once: each round compares the next token of the rows that still agree."""
    (starts, values), (other_starts, other_values) = (
        (column.offsets.to_numpy(), column.values.to_numpy()) for column in (chosen, rejected)
    )
    longest = np.maximum(np.minimum(np.diff(starts), np.diff(other_starts)) - 1, 0)
    shared = np.zeros(len(longest), np.int64)
    rows = np.flatnonzero(longest)
    while len(rows):
        agree = values[starts[rows] + shared[rows]] == other_values[other_starts[rows] + shared[rows]]
        rows = rows[agree]
        shared[rows] += 1
        rows = rows[shared[rows] < longest[rows]]
    return shared
