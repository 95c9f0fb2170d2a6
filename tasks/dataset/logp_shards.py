"""Reference log-probabilities on disk by what determines them: a pair's tokens, in a folder for model and precision.

A shard is a Parquet file with the keys of its pairs, named by those keys and by its own hash: it is whole or not there,
and a damaged one is passed over.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from tasks.dataset.pairs import REFERENCE_SCHEMA
from tasks.files import fingerprint, sha256
from training.packing import Pair

AT_ONCE = 10_000  # rows that are written together
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("chosen_logps", pa.list_(pa.float32())),
        ("rejected_logps", pa.list_(pa.float32())),
    ]
)


def key_of(pair: Pair) -> str:
    """Of a pair's tokens: whatever its id, source or weight, these determine its log-probabilities."""
    digest = hashlib.sha256()
    for part in (pair.prompt, pair.chosen, pair.rejected):
        tokens = np.asarray(part, dtype=np.int32)
        digest.update(len(tokens).to_bytes(4, "little") + tokens.tobytes())
    return digest.hexdigest()[:32]


def shards(pairs: Sequence[Pair], keys: Sequence[str], size: int) -> Iterator[tuple[list[Pair], list[str]]]:
    """The pairs by shard, each key once."""
    first = dict(zip(reversed(keys), reversed(pairs), strict=True))
    unique = list(dict.fromkeys(keys))
    for start in range(0, len(unique), size):
        some = unique[start : start + size]
        yield [first[key] for key in some], some


def write_shard(folder: Path, keys: Sequence[str], scores: Sequence[tuple[Any, Any]]) -> None:
    """Written aside, synced, and published under its hash."""
    table = pa.table([list(keys), *([score[side] for score in scores] for side in (0, 1))], schema=SCHEMA)
    aside = folder / f".{fingerprint(list(keys))}.{os.getpid()}"
    parquet.write_table(table, aside, compression="zstd")
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, folder / f"{fingerprint(list(keys))}-{sha256(aside)[:16]}.parquet")


def read_shards(folder: Path) -> pa.Table:
    """Every value that is there, a row for each key."""
    tables = [SCHEMA.empty_table()]
    for path in sorted(folder.glob("*.parquet")):
        if sha256(path)[:16] == path.stem.rpartition("-")[2]:
            tables.append(parquet.read_table(path))
        else:
            print(f"warning: shard {path} is damaged; its pairs are computed again", file=sys.stderr)
            path.unlink()
    return pa.concat_tables(tables)


def no_values() -> pa.Table:
    return SCHEMA.empty_table()


def known_keys(values: pa.Table) -> set[str]:
    return set(values["key"].to_pylist())


def write_values(path: Path, ids: Sequence[str], keys: Sequence[str], values: pa.Table) -> None:
    """The values by pair id, in the order of the pairs."""
    place = {key: at for at, key in enumerate(values["key"].to_pylist())}
    with parquet.ParquetWriter(path, REFERENCE_SCHEMA, compression="zstd") as writer:
        for start in range(0, len(ids), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            rows = values.take([place[key] for key in keys[some]])
            columns = [list(ids[some]), *(rows[name].combine_chunks() for name in ("chosen_logps", "rejected_logps"))]
            writer.write_table(pa.table(columns, schema=REFERENCE_SCHEMA))
