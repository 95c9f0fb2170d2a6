"""The pairs and reference artefacts on disk: Parquet with fixed columns, read back as training.packing.Pair."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from tasks.errors import UserError
from tasks.files import read_json, sha256
from tasks.paths import PAIRS, REFERENCE
from training.packing import Pair

SPLITS = ("train", "eval")
HASHES = "hashes.json"  # of the pairs
TOKENS = {  # a pair's field by the file's column
    "prompt_ids": "prompt",
    "chosen_ids": "chosen",
    "rejected_ids": "rejected",
    "chosen_mask": "chosen_mask",
    "rejected_mask": "rejected_mask",
}
NUMBERS = {"label": 1.0, "margin": 0.0, "weight": 1.0}  # what a pair has that says nothing

PAIR_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("prompt_mask", pa.list_(pa.int8())),  # empty where no token of the prompt counts
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


def check(path: Path, stage: str) -> None:
    """UserError where a file is not what its stage wrote: DVC takes its cache's word for what it checks out."""
    manifest = path.parent / (HASHES if stage == "prepare" else "manifest.json")
    if manifest.exists() and read_json(manifest)["files"].get(path.name) != sha256(path):
        raise UserError(
            f"{path} is not what the {stage} stage wrote: its content hash is not that of {manifest}. If nobody edited "
            f"it, DVC's cache is damaged: run `make check-cache FIX=1`, which removes damaged objects, and this again."
        )


def check_inputs() -> None:
    """Before workers start: what they read is what the stages before wrote."""
    for split in SPLITS:
        check(PAIRS / f"{split}.parquet", "prepare")
        check(REFERENCE / f"{split}.parquet", "reference")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return parquet.read_table(path).to_pylist()


def count_pairs(split: str) -> int:
    return parquet.read_metadata(PAIRS / f"{split}.parquet").num_rows


def read_pairs(split: str, root: Path = Path()) -> list[Pair]:
    """The pairs of a split; their tokens are views of the file's columns, not copies."""
    check(root / PAIRS / f"{split}.parquet", "prepare")
    table = parquet.read_table(root / PAIRS / f"{split}.parquet")
    columns: dict[str, list[Any]] = {"id": table["id"].to_pylist()}
    columns |= {field: _lists(table, column) for column, field in TOKENS.items()}
    columns |= {name: _numbers(table, name, default) for name, default in NUMBERS.items()}
    pairs = [Pair(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
    if "prompt_mask" not in table.column_names:  # a file that an earlier version wrote
        return pairs
    return [_with_counted(pair, mask) for pair, mask in zip(pairs, _lists(table, "prompt_mask"), strict=True)]


def _with_counted(pair: Pair, prompt_mask: np.ndarray) -> Pair:
    """The pair with both responses beginning at the first prompt token that counts, since that token is predicted too.

    Tokens that both responses begin with are computed once, so this costs no more than a prompt.
    """
    if not prompt_mask.any():
        return pair
    first = int(prompt_mask.argmax())
    assert first > 0, f"pair {pair.id}: nothing predicts the first token of a prompt"
    counted, mask = pair.prompt[first:], prompt_mask[first:]
    return replace(
        pair,
        prompt=pair.prompt[:first],
        chosen=np.concatenate([counted, pair.chosen]),
        rejected=np.concatenate([counted, pair.rejected]),
        chosen_mask=np.concatenate([mask, pair.chosen_mask]),
        rejected_mask=np.concatenate([mask, pair.rejected_mask]),
    )


def read_sources(split: str, root: Path = Path()) -> list[str]:
    """Of each pair of a split the name of its source."""
    column = parquet.read_table(root / PAIRS / f"{split}.parquet", columns=["source"])["source"]
    return [name or "" for name in column.to_pylist()]


def with_reference(pairs: list[Pair], split: str, root: Path = Path()) -> list[Pair]:
    """The pairs with their reference log-probabilities; each pair must have its own."""
    path = root / REFERENCE / f"{split}.parquet"
    check(path, "reference")
    table = parquet.read_table(path)
    place = {name: at for at, name in enumerate(table["id"].to_pylist())}
    missing = [pair.id for pair in pairs if pair.id not in place]
    if missing:
        raise UserError(
            f"{len(missing)} pairs of {split} (first: {missing[0]}) have no reference log-probabilities. "
            "Run `dvc repro reference`."
        )
    chosen, rejected = _lists(table, "chosen_logps"), _lists(table, "rejected_logps")
    return [replace(pair, ref_chosen=chosen[place[pair.id]], ref_rejected=rejected[place[pair.id]]) for pair in pairs]


def _lists(table: pa.Table, name: str) -> list[np.ndarray]:
    array = table[name].combine_chunks()
    offsets, values = array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in pairwise(offsets)]


def _numbers(table: pa.Table, name: str, default: float) -> list[float]:
    return table[name].fill_null(default).to_pylist()
