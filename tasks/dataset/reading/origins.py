"""Which raw row each pair comes from: its file, its line or row number, and the person in its column `user`.

Pairs do not store this. It is found by reading data/raw again, as `prepare` reads it, without tokenizing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config.params import Prepare
from tasks.config.paths import RAW
from tasks.dataset.reading.readers import first_rows, read_chunks, rows_in
from tasks.dataset.rows.layouts import find_layout
from tasks.dataset.rows.preference import PairingOptions, Preference, pair_id
from tasks.dataset.rows.reject_reasons import RawRow
from tasks.dataset.rows.row_shapes import rename_columns, to_preferences
from tasks.system.files import read_json

USER = "user"  # the column that names the person to whom a row belongs


@dataclass(frozen=True)
class Origin:
    file: str  # as the user knows it
    row: int  # line or row number
    user: str


def raw_rows(root: Path = Path()) -> Iterator[tuple[dict[str, Any], dict[str, Any], int, RawRow]]:
    """Every readable row of data/raw: its source and file as the manifest describes them, its number, and the row."""
    for entry in read_json(root / RAW / "manifest.json").get("sources", []):
        for file in entry["files"]:
            for chunk in read_chunks(root / RAW / entry["name"] / file["file"], file["called"]):
                yield from ((entry, file, number, row) for number, row in rows_in(chunk) if isinstance(row, dict))


def belongs_to(row: RawRow, user: str) -> bool:
    """Whether the row is a person's: its column `user`, or one of the names in `raters`, a line each."""
    return str(row.get(USER)) == user or user in str(row.get("raters") or "").split("\n")


def pair_origins(params: Prepare) -> dict[str, Origin]:
    """The origin of each pair that the rows of data/raw contain, by its id; of equal pairs the first."""
    found: dict[str, Origin] = {}
    layouts: dict[str, Any] = {}
    for entry, file, number, row in raw_rows():
        if entry["key"] == "source.sft":
            continue
        if entry["name"] not in layouts:
            first = entry["files"][0]
            rows = first_rows(RAW / entry["name"] / first["file"], first["called"])
            wanted = params.by_source.get(entry["name"], params)
            layouts[entry["name"]] = find_layout(rows, first["called"], wanted)
        layout = layouts[entry["name"]]
        options = PairingOptions(params.expand, params.min_margin, params.ties, layout.votes)
        for one in to_preferences(rename_columns(row, layout.columns), layout.shape, layout.columns, options):
            if isinstance(one, Preference):
                found.setdefault(pair_id(one), Origin(file["called"], number, str(row.get(USER) or "")))
    return found
