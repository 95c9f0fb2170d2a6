"""The rows of data/raw and their layout, and which row each pair comes from: its file, its row number, its user.

Pairs do not store their row. data/raw is read again for it, as `prepare` reads it, without tokenizing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config.paths import RAW, SAMPLE
from tasks.config.prepare import Prepare
from tasks.prepare.rows.layouts import source_layout
from tasks.prepare.rows.preference import Preference, RowLayout
from tasks.prepare.rows.row_shapes import to_preferences
from tasks.source.readers import first_rows, read_rows
from tasks.source.reject_reasons import RawRow
from tasks.system.files import read_json

SAMPLED = "sample"  # the key of the pairs of the stage `sample`
USER = "user"  # the column that names the person to whom a row belongs


@dataclass(frozen=True)
class Origin:
    file: str  # as the user knows it
    row: int  # line or row number
    user: str


def raw_sources(root: Path = Path()) -> list[dict[str, Any]]:
    """The sources of data/raw, as its manifest describes them."""
    return read_json(root / RAW / "manifest.json")["sources"]


def files_of(source: dict[str, Any], root: Path = Path()) -> list[tuple[Path, str]]:
    """(path, name as the user knows it) of each file of a source of data/raw, or of the pairs of the stage `sample`."""
    folder = root / (SAMPLE if source["key"] == SAMPLED else RAW / source["name"])
    return [(folder / file["file"], file["called"]) for file in source["files"]]


def rows_of(source: dict[str, Any], root: Path = Path()) -> Iterator[tuple[str, int, RawRow]]:
    """(file as the user knows it, row number, row) of each readable row of a source."""
    for path, name in files_of(source, root):
        yield from ((name, number, row) for number, row in read_rows(path, name) if isinstance(row, dict))


def layout_of(source: dict[str, Any], params: Prepare) -> RowLayout:
    path, name = files_of(source)[0]
    return source_layout(source["name"], first_rows(path, name), name, params)


def belongs_to(row: RawRow, user: str) -> bool:
    """Whether the row is a person's: its column `user`, or one of the names in `raters`, a line each."""
    return str(row.get(USER)) == user or user in str(row.get("raters") or "").split("\n")


def pair_origins(params: Prepare) -> dict[str, Origin]:
    """The origin of each pair that the rows of data/raw contain, by its id; of equal pairs the first."""
    origins: dict[str, Origin] = {}
    for source in raw_sources():
        if source["key"] == "source.sft":
            continue
        layout = layout_of(source, params)
        for file, number, row in rows_of(source):
            for pair in to_preferences(row, layout):
                if isinstance(pair, Preference):
                    origins.setdefault(pair.id, Origin(file, number, str(row.get(USER) or "")))
    return origins
