"""Pairs as a memory-mapped file: the same pairs and numbers as a list of Pair objects, without holding them."""

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tasks.artifacts.pairs import PAIR_SCHEMA, REFERENCE_SCHEMA, PairTable, open_table
from tasks.errors import UserError
from tasks.prepare import shards
from training.pairs.batches import pair_costs
from training.pairs.pair import Pair
from training.pairs.pair_columns import columns_of, longest, shortest

SOURCES = ("web", "people")


def make_rows(count: int, prompt_loss: bool = False) -> list[dict[str, Any]]:
    rng = random.Random(count)
    rows = []
    for number in range(count):
        prompt, shared = ([rng.randrange(9) for _ in range(rng.randint(2, 9))] for _ in range(2))
        chosen, rejected = ([*shared[: rng.randint(0, 8)], rng.randrange(9), 7] for _ in range(2))
        row = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        masks = {f"{side}_mask": [rng.randrange(2) for _ in row[f"{side}_ids"]] for side in ("chosen", "rejected")}
        masks["prompt_mask"] = [0] + [1] * (len(prompt) - 1) if prompt_loss else []
        choices = {"label": [1.0, 0.5], "margin": [0.0, 2.5], "weight": [1.0, 0.25]}
        numbers = {"sign": 0, **{name: rng.choice(values) for name, values in choices.items()}}
        rows.append({"id": f"p{number}", "prompt": "?", **row, **masks, **numbers, "source": SOURCES[number % 2]})
    return rows


def write(folder: Path, rows: list[dict[str, Any]], batch: int, monkeypatch: pytest.MonkeyPatch) -> pa.Table:
    """As `prepare` writes them, in record batches of `batch` pairs."""
    monkeypatch.setattr(shards, "BATCH_ROWS", batch)
    parts = [rows[start : start + 13] for start in range(0, len(rows), 13)]
    files = [folder / f"{number}.shard" for number in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        shards.write_shard(file, part)
    all_rows = [np.ones(len(part), bool) for part in parts]
    shards.write_splits(folder, files, all_rows, [~mask for mask in all_rows])
    return open_table(folder / "train.arrow")


def as_list(rows: list[dict[str, Any]], prompt_loss: bool) -> list[Pair]:
    pairs = []
    for row in rows:
        moved = row["prompt_ids"][1:] if prompt_loss else []
        pairs.append(
            Pair(
                row["id"],
                row["prompt_ids"][:1] if prompt_loss else row["prompt_ids"],
                moved + row["chosen_ids"],
                moved + row["rejected_ids"],
                [1] * len(moved) + row["chosen_mask"],
                [1] * len(moved) + row["rejected_mask"],
                label=row["label"],
                margin=row["margin"],
                weight=row["weight"],
            )
        )
    return pairs


def plain(pair: Pair) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in asdict(pair).items()}


@pytest.mark.parametrize("prompt_loss", [False, True])
def test_a_file_of_pairs_equals_the_list(prompt_loss, tmp_path, monkeypatch):
    rows = make_rows(60, prompt_loss)
    table, expected = PairTable(write(tmp_path, rows, 25, monkeypatch)), as_list(rows, prompt_loss)
    assert [plain(pair) for pair in table] == [plain(pair) for pair in expected]
    assert [pair.id for pair in table[10:50:20]] == ["p10", "p30"]
    columns = columns_of(expected)
    for name in ("prompt", "chosen", "rejected", "shared_prefix", "label", "margin", "weight", "lengths", "targets"):
        assert getattr(table.columns, name).tolist() == getattr(columns, name).tolist(), name
    assert table.columns.lengths.tolist() == [len(pair) for pair in expected]
    assert table.columns.attended_tokens.tolist() == columns.attended_tokens.tolist()
    assert pair_costs(table, 64).tolist() == (columns.lengths + columns.attended_tokens / 384).tolist()
    assert (shortest(table).id, longest(table).id) == (min(expected, key=len).id, max(expected, key=len).id)
    by_source = table.by_source()
    assert {name: [pair.id for pair in some] for name, some in by_source.items()} == {
        name: [row["id"] for row in rows if row["source"] == name] for name in SOURCES
    }
    assert by_source["people"].columns.lengths.tolist() == [len(pair) for pair in expected[1::2]]


def test_reference_values_are_those_of_the_same_pairs(tmp_path, monkeypatch):
    table = PairTable(write(tmp_path, make_rows(30), 8, monkeypatch))

    def values(order: list[int]) -> pa.Table:
        rows = [{"id": f"p{n}", "chosen_logps": [-n, 0.5], "rejected_logps": [n]} for n in order]
        return pa.Table.from_pylist(rows, REFERENCE_SCHEMA)

    joined = table.with_reference(values(list(range(30))))
    assert [float(pair.ref_chosen_logps[0]) for pair in joined] == [-n for n in range(30)]
    assert [float(pair.ref_rejected_logps[0]) for pair in joined.by_source()["people"]] == list(range(1, 30, 2))
    for other in ([*range(29, -1, -1)], list(range(29))):
        with pytest.raises(UserError, match="These pairs have no reference log-probabilities: they changed"):
            table.with_reference(values(other))


def test_an_open_file_takes_no_memory_for_its_pairs(tmp_path, monkeypatch):
    write(tmp_path, make_rows(2000), 500, monkeypatch)
    before = pa.total_allocated_bytes()
    table = PairTable(open_table(tmp_path / "train.arrow"))
    assert len(table[1999].prompt_ids)
    assert pa.total_allocated_bytes() == before  # the file is mapped, not read
    assert not table[7].chosen_ids.flags.owndata


def test_datasets_opens_the_files(tmp_path, monkeypatch):
    from datasets import Dataset

    rows = make_rows(20)
    write(tmp_path, rows, 6, monkeypatch)
    opened = Dataset.from_file(str(tmp_path / "train.arrow"))
    assert opened.column_names == PAIR_SCHEMA.names
    assert opened[13]["chosen_ids"] == rows[13]["chosen_ids"]
