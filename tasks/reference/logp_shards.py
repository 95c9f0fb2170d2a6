"""Reference log-probabilities on disk, by pair: shards in a folder for one model and precision.

A pair's key is a hash of its tokens. A shard is a Parquet file named by its keys and its own hash: it is complete or
absent, and a damaged one is deleted.
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

from tasks.artifacts.pairs import REFERENCE_SCHEMA
from tasks.system.files import fingerprint, sha256, sync, temporary
from training.pairs.pair import Pair

WRITE_BATCH = 10_000  # rows
SCHEMA = REFERENCE_SCHEMA.set(0, pa.field("key", pa.string()))


def pair_key(pair: Pair) -> str:
    """A hash of the tokens, which alone determine the log-probabilities: not of the id, source or weight."""
    digest = hashlib.sha256()
    for part in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids):
        tokens = np.asarray(part, dtype=np.int32)
        digest.update(len(tokens).to_bytes(4, "little") + tokens.tobytes())
    return digest.hexdigest()[:32]


def missing_shards(keys: Sequence[str], stored: set[str], size: int) -> Iterator[dict[str, int]]:
    """The pairs without stored values in shards of `size`: the number of the first pair with each key."""
    first: dict[str, int] = {}
    for number, key in enumerate(keys):
        if key not in stored:
            first.setdefault(key, number)
    missing = list(first.items())
    for start in range(0, len(missing), size):
        yield dict(missing[start : start + size])


def write_shard(folder: Path, keys: Sequence[str], scores: Sequence[tuple[Any, Any]]) -> None:
    """Atomically: write a temporary file, sync it, and rename it to its hash."""
    table = pa.table([list(keys), *([score[side] for score in scores] for side in (0, 1))], schema=SCHEMA)
    name = fingerprint(list(keys))
    with temporary(folder / name) as file:
        parquet.write_table(table, file, compression="zstd")
        sync(file)
        os.replace(file, folder / f"{name}-{sha256(file)[:16]}.parquet")


def read_shards(folder: Path) -> pa.Table:
    """One row per key."""
    tables = [SCHEMA.empty_table()]
    for path in sorted(folder.glob("*.parquet")):
        if sha256(path)[:16] == path.stem.rpartition("-")[2]:
            tables.append(parquet.read_table(path))
        else:
            print(f"warning: shard {path} is damaged; recomputing its pairs", file=sys.stderr)
            path.unlink()
    return pa.concat_tables(tables)


def stored_keys(logps: pa.Table) -> set[str]:
    return set(logps["key"].to_pylist())


def write_reference(path: Path, ids: pa.ChunkedArray, keys: Sequence[str], logps: pa.Table) -> None:
    """The log-probabilities by pair id, in the order of the pairs."""
    rows = {key: row for row, key in enumerate(logps["key"].to_pylist())}
    with pa.ipc.new_stream(path, REFERENCE_SCHEMA) as writer:  # not compressed: it is memory-mapped
        for start in range(0, len(ids), WRITE_BATCH):
            values = logps.take([rows[key] for key in keys[start : start + WRITE_BATCH]])
            columns = [ids.slice(start, WRITE_BATCH), values["chosen_logps"], values["rejected_logps"]]
            writer.write_table(pa.table(columns, schema=REFERENCE_SCHEMA).combine_chunks())
