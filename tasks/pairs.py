"""The pairs and reference artefacts on disk: Parquet with fixed columns, read back as training.packing.Pair."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from tasks.errors import UserError
from tasks.paths import PAIRS, REFERENCE
from training.packing import Pair

SPLITS = ("train", "eval")

PAIR_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("chosen_ids", pa.list_(pa.int32())),
        ("chosen_mask", pa.list_(pa.int8())),
        ("rejected_ids", pa.list_(pa.int32())),
        ("rejected_mask", pa.list_(pa.int8())),
        ("label", pa.float32()),  # how likely it is that chosen is the better one
        ("margin", pa.float32()),  # by how much, where the data has scores
        ("weight", pa.float32()),
        ("source", pa.string()),
    ]
)
REFERENCE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("chosen_logps", pa.list_(pa.float32())),
        ("rejected_logps", pa.list_(pa.float32())),
    ]
)


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> None:
    parquet.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, compression="zstd")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return parquet.read_table(path).to_pylist()


def read_pairs(split: str, root: Path = Path()) -> list[Pair]:
    return [
        Pair(
            row["id"],
            row["prompt_ids"],
            row["chosen_ids"],
            row["rejected_ids"],
            row["chosen_mask"],
            row["rejected_mask"],
        )
        for row in read_rows(root / PAIRS / f"{split}.parquet")
    ]


def with_reference(pairs: list[Pair], split: str, root: Path = Path()) -> list[Pair]:
    """The pairs with their reference log-probabilities; each pair must have its own."""
    values = {row["id"]: row for row in read_rows(root / REFERENCE / f"{split}.parquet")}
    missing = [pair.id for pair in pairs if pair.id not in values]
    if missing:
        raise UserError(
            f"{len(missing)} pairs of {split} (first: {missing[0]}) have no reference log-probabilities. "
            "Run `dvc repro reference`."
        )
    return [
        replace(pair, ref_chosen=values[pair.id]["chosen_logps"], ref_rejected=values[pair.id]["rejected_logps"])
        for pair in pairs
    ]
