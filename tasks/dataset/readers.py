"""Files of rows: JSON, JSONL, CSV, Parquet and Arrow, plain or compressed, read in chunks of bounded size.

The reader cuts a file into chunks and does little more, so that other processes can take the chunks apart. The cuts
depend on the content alone. What is wrong with a whole file is an error here; what is wrong with a row is a BadRow in
its place.
"""

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet

from tasks.dataset.violations import BadRow
from tasks.errors import UserError

Row = dict[str, Any]
CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 1000
BUFFER = 1 << 20
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
COMPRESSED = (".gz", ".zst", ".zstd")
csv.field_size_limit(1 << 30)


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file, as cheap to make as can be: lines of JSON, rows, or a batch of Arrow's."""

    start: int  # the number of the first line or row, from 1
    content: bytes | list[Row] | pa.RecordBatch


def suffix_of(name: str | Path) -> str:
    """What a file holds by its name, compression aside."""
    path = Path(name)
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def read_chunks(path: Path, name: str) -> Iterator[Chunk]:
    """The file's chunks. `name` is what the user calls the file."""
    reader = _READERS[suffix_of(path)]
    try:
        yield from reader(path, name)
    except (EOFError, OSError, zlib.error, pa.ArrowInvalid) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"{name} is damaged or was cut off ({reason}). Fetch or write it again.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start}: {error.reason}). Save it as UTF-8.") from None


def rows_in(chunk: Chunk) -> Iterator[tuple[int, Row | BadRow]]:
    """(line or row number, row), or what is wrong with it."""
    if isinstance(chunk.content, bytes):
        for number, line in enumerate(chunk.content.split(b"\n"), start=chunk.start):
            if line and not line.isspace():
                yield number, _parse(line)
    else:
        rows = chunk.content if isinstance(chunk.content, list) else chunk.content.to_pylist()
        for number, row in enumerate(rows, start=chunk.start):
            yield number, row if isinstance(row, dict) else BadRow("not_an_object", type(row).__name__, row)


def count_rows(chunk: Chunk) -> int:
    if isinstance(chunk.content, bytes):
        return sum(1 for line in chunk.content.split(b"\n") if line and not line.isspace())
    return len(chunk.content)


def _parse(line: bytes) -> Row | BadRow:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRow("invalid_utf8", f"byte {error.start} of the line", line.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        return BadRow("invalid_json", str(error), line.decode())
    return row if isinstance(row, dict) else BadRow("not_an_object", type(row).__name__, row)


def _open(path: Path) -> IO[bytes]:
    """Decompressed by what the file begins with, whatever it is called."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.open(path, "rb"), BUFFER)
    if magic == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), BUFFER)
    return path.open("rb", buffering=BUFFER)


def _jsonl(path: Path, name: str) -> Iterator[Chunk]:
    number = 1
    with _open(path) as file:
        while lines := file.readlines(CHUNK_BYTES):
            if number == 1:
                lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
            if not lines[-1].endswith(b"\n") and isinstance(bad := _parse(lines[-1]), BadRow):
                raise UserError(
                    f"{name} was cut off: its last line, {number + len(lines) - 1}, does not end and is no whole row "
                    f"({bad.detail}). Fetch or write it again, or delete the line."
                )
            yield Chunk(number, b"".join(lines))
            number += len(lines)


def _json(path: Path, name: str) -> Iterator[Chunk]:
    """A list of rows, taken apart without holding it whole; or, as many files are, lines after all."""
    with _open(path) as file:
        first, second = file.readline(), file.readline()
    if second and isinstance(_parse(first), dict):
        yield from _jsonl(path, name)
        return
    with _open(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig")
        start = text.read(BUFFER).lstrip()
        if start[:1] == "[":
            yield from _in_chunks(_elements(start[1:], text, name))
            return
    if start:
        raise UserError(f"{name}: a .json file must hold a list of rows. One object per line is fine too.")


def _elements(buffer: str, text: IO[str], name: str) -> Iterator[Any]:
    decode, number = json.JSONDecoder().raw_decode, 1
    while True:
        buffer = buffer.lstrip().removeprefix(",").lstrip()
        if buffer[:1] == "]":
            return
        try:
            row, end = decode(buffer)
            if end == len(buffer):  # a number might go on
                raise json.JSONDecodeError("more to come", buffer, end)
        except json.JSONDecodeError as error:
            more = text.read(max(BUFFER, len(buffer)))
            if not more:
                raise UserError(f"{name}, row {number}: not valid JSON ({error}), or the file was cut off.") from None
            buffer += more
            continue
        yield row
        buffer, number = buffer[end:], number + 1


def _csv(path: Path, name: str) -> Iterator[Chunk]:
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    with _open(path) as file:
        reader = csv.DictReader(
            io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True
        )
        try:
            yield from _in_chunks(reader)
        except csv.Error as error:
            raise UserError(
                f"{name}, after line {reader.line_num}: not valid CSV ({error}). Mend the quotes."
            ) from None


def _parquet(path: Path, name: str) -> Iterator[Chunk]:
    with pyarrow.parquet.ParquetFile(path) as file:
        yield from _batches(file.iter_batches(batch_size=CHUNK_ROWS))


def _arrow(path: Path, name: str) -> Iterator[Chunk]:
    """Arrow's file format, or its stream format, which `datasets` writes."""
    with pa.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            batches: Iterable[pa.RecordBatch] = (reader.get_batch(n) for n in range(reader.num_record_batches))
        else:
            file.seek(0)
            batches = pa.ipc.open_stream(file)
        yield from _batches(batches)


def _batches(batches: Iterable[pa.RecordBatch]) -> Iterator[Chunk]:
    number = 1
    for batch in batches:
        for start in range(0, len(batch), CHUNK_ROWS):
            yield Chunk(number + start, batch.slice(start, CHUNK_ROWS))
        number += len(batch)


def _in_chunks(rows: Iterable[Any]) -> Iterator[Chunk]:
    rows, number = iter(rows), 1
    for first in rows:
        some = [first, *islice(rows, CHUNK_ROWS - 1)]
        yield Chunk(number, some)
        number += len(some)


_READERS: dict[str, Callable[[Path, str], Iterator[Chunk]]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _jsonl),
    ".json": _json,
    **dict.fromkeys((".csv", ".tsv"), _csv),
    ".parquet": _parquet,
    **dict.fromkeys((".arrow", ".feather"), _arrow),
}


def first_rows(path: Path, name: str) -> list[Row]:
    """Some rows, to tell the shape by: those of the first chunk that has any."""
    for chunk in read_chunks(path, name):
        if rows := [row for _, row in rows_in(chunk) if isinstance(row, dict)]:
            return rows
    return []
