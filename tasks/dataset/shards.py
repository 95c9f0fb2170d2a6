"""Writes data/pairs: one Arrow file per chunk first, then one per split in the order of the rows."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.dataset.pairs import PAIR_SCHEMA, SPLITS

BATCH_ROWS = 8192  # of a record batch


def write_shard(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of PAIR_SCHEMA. Lists of numbers are concatenated first, which Arrow takes without a copy."""
    rows = [{"sign": 0, **row} for row in rows]
    fields = [field for field in PAIR_SCHEMA if field.name != "shared_prefix"]
    arrays = {field.name: _array([row[field.name] for row in rows], field.type) for field in fields}
    arrays["shared_prefix"] = pa.array(shared_prefixes(arrays["chosen_ids"], arrays["rejected_ids"]), pa.int32())
    table = pa.table([arrays[name] for name in PAIR_SCHEMA.names], schema=PAIR_SCHEMA)
    with pa.ipc.new_file(path, PAIR_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)


def read_shard(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def write_splits(
    folder: Path,
    shards: Sequence[Path],
    kept: Sequence[NDArray[Any]],
    held_out: Sequence[NDArray[Any]],
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """train.arrow and eval.arrow (or `names`) from the shards, with the masks of their kept and held-out rows."""
    for split in SPLITS:
        masks = [keep & (held == (split == "eval")) for keep, held in zip(kept, held_out, strict=True)]
        tables = (
            read_shard(path).filter(pa.array(mask)) for path, mask in zip(shards, masks, strict=True) if mask.any()
        )
        with pa.ipc.new_stream(
            folder / f"{names.get(split, split)}.arrow", PAIR_SCHEMA
        ) as writer:  # not compressed: it is memory-mapped
            for batch in _batches(tables):
                writer.write_table(batch.combine_chunks())


def _batches(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of BATCH_ROWS."""
    waiting: pa.Table | None = None
    for table in tables:
        waiting = pa.concat_tables([waiting, table]) if waiting is not None else table
        while len(waiting) >= BATCH_ROWS:
            yield waiting.slice(0, BATCH_ROWS)
            waiting = waiting.slice(BATCH_ROWS)
    if waiting is not None and len(waiting):
        yield waiting


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


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    lengths = np.fromiter(map(len, values), dtype=np.int32, count=len(values))
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    flat = np.fromiter(chain.from_iterable(values), dtype=kind.value_type.to_pandas_dtype(), count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
