"""Prepared pairs on their way to data/pairs: one Arrow file for each chunk, then Parquet in the rows' order."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from tasks.dataset.pairs import PAIR_SCHEMA, SPLITS

GROUP_ROWS = 8192  # of a Parquet row group


def write_shard(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of the pairs' schema. Lists of numbers are laid end to end first: Arrow takes them as they are then."""
    arrays = [_array([row[field.name] for row in rows], field.type) for field in PAIR_SCHEMA]
    table = pa.table(arrays, schema=PAIR_SCHEMA)
    with pa.ipc.new_file(path, PAIR_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)


def read_shard(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def first_pairs(path: Path, count: int) -> list[dict[str, Any]]:
    """The first rows of a Parquet file, without reading the others."""
    with pyarrow.parquet.ParquetFile(path) as file:
        batch = next(file.iter_batches(batch_size=count), None)
        return batch.to_pylist() if batch is not None else []


def write_splits(
    folder: Path, shards: Sequence[Path], kept: Sequence[NDArray[Any]], held: Sequence[NDArray[Any]]
) -> None:
    """train.parquet and eval.parquet from the shards, each with its masks of rows."""
    for split in SPLITS:
        masks = [keep & (out if split == "eval" else ~out) for keep, out in zip(kept, held, strict=True)]
        tables = (
            read_shard(path).filter(pa.array(mask)) for path, mask in zip(shards, masks, strict=True) if mask.any()
        )
        options: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["source"], "write_statistics": False}
        with pyarrow.parquet.ParquetWriter(folder / f"{split}.parquet", PAIR_SCHEMA, **options) as writer:
            for group in _groups(tables):
                writer.write_table(group, row_group_size=GROUP_ROWS)


def _groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of GROUP_ROWS."""
    waiting: pa.Table | None = None
    for table in tables:
        waiting = pa.concat_tables([waiting, table]) if waiting is not None else table
        while len(waiting) >= GROUP_ROWS:
            yield waiting.slice(0, GROUP_ROWS)
            waiting = waiting.slice(GROUP_ROWS)
    if waiting is not None and len(waiting):
        yield waiting


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    lengths = np.fromiter(map(len, values), dtype=np.int32, count=len(values))
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    flat = np.fromiter(chain.from_iterable(values), dtype=kind.value_type.to_pandas_dtype(), count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
